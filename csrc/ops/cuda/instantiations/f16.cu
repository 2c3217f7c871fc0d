#include "../general/kernels.h"
#include "../votes/kernels.h"

namespace capsfast::cuda {

template const GeneralKernels<float>& general_kernels<Float16>(bool);
template VotesKernels votes_kernels<Float16>(Exchange, int);

}  // namespace capsfast::cuda
