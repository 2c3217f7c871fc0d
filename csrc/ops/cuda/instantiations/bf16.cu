#include "../general/kernels.h"
#include "../votes/kernels.h"

namespace capsfast::cuda {

template const GeneralKernels<float>& general_kernels<BFloat16>(bool);
template VotesKernels votes_kernels<BFloat16>(Exchange, int);

}  // namespace capsfast::cuda
