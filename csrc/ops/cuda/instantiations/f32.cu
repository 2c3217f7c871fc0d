#include "../general/kernels.h"
#include "../votes/kernels.h"

namespace capsfast::cuda {

template const GeneralKernels<float>& general_kernels<float>(bool);
template VotesKernels votes_kernels<float>(Exchange, int);

}  // namespace capsfast::cuda
