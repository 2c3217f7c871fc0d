#include "routing.h"

#include <cstdint>
#include <type_traits>

#include "backward.h"
#include "context.h"
#include "forward.h"
#include "parts.h"

namespace capsfast {

namespace {

using namespace driver;

// What a forward leaves for its backward, for a slice of positions. It is not kept between the two calls: it would take
// r / I of the memory of the votes, and I is small. So the backward routes a slice again while its votes are in the
// cache.
template <class T>
class Intermediate {
 public:
  explicit Intermediate(const Problem& slice)
      : p_(slice),
        sums_(slice.side_by_side && !slice.capsule_lanes ? p_.iterations * p_.B * p_.J : 0),
        s_(sums_ * p_.D),
        norm_(p_.softmax_in() ? 2 * sums_ : 0) {}
  // Makes `kept` point to this memory.
  template <class Kept>
  void replace(Kept* kept) const {
    if (sums_ == 0) return;
    kept->batch = p_.B;
    kept->s = s_.get();
    kept->norm = norm_.get();
  }
  // Routes the slice for a backward.
  void route(BackwardInputs* in) const {
    if (sums_ == 0) return;
    const Buffer<T> v(p_.B * p_.J * p_.D);
    ForwardOutputs again;
    again.v = View{v.get(), kStorage<T>, {p_.J * p_.D, p_.D, 1}};
    replace(&again);
    Forward<T>(p_, again, 1).run();
    replace(in);
  }

 private:
  const Problem& p_;
  int64_t sums_;
  Buffer<T> s_, norm_;
};

// s and norm from sample n on. With positions nothing is kept in them.
template <class T, class Kept>
void move(Kept* kept, const Problem& p, int64_t n) {
  using Numbers = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(kept->s)>>, const T*, T*>;
  if (p.positions >= 0) return;
  kept->s = static_cast<Numbers>(kept->s) + n * p.J * p.D;
  kept->norm = static_cast<Numbers>(kept->norm) + (p.softmax_in() ? n * p.J : 0);
}

template <class T>
struct ForwardCall {
  ForwardOutputs out;
  BackwardOutputs gradients = {};

  ForwardCall from(const Problem& p, int64_t n) const {
    ForwardCall part = *this;
    part.out.v = samples(p, out.v, n);
    part.out.coupling = samples(p, out.coupling, n);
    move<T>(&part.out, p, n);
    return part;
  }
  Parts parts(const Problem& p) const { return {1, p.B}; }
  void run(const Problem& p, const Totals<T>& totals) const {
    ForwardOutputs part = out;
    const Intermediate<T> intermediate(p);
    intermediate.replace(&part);
    Forward<T>(p, part, totals.threads).run();
  }
};

template <class T>
struct BackwardCall {
  BackwardInputs in;
  BackwardOutputs gradients;

  BackwardCall from(const Problem& p, int64_t n) const {
    BackwardCall part{in, samples(p, gradients, n)};
    for (View* view : {&part.in.dv, &part.in.dcoupling, &part.in.coupling}) *view = samples(p, *view, n);
    move<T>(&part.in, p, n);
    return part;
  }
  Parts parts(const Problem& p) const { return {1, p.B}; }
  void run(const Problem& p, const Totals<T>& totals) const {
    BackwardInputs part = in;
    const Intermediate<T> intermediate(p);
    intermediate.route(&part);
    Backward<T>(p, part, gradients, totals).run();
  }
};

}  // namespace

template <class T>
void routing_forward(const Problem& p, const ForwardOutputs& out) {
  driver::run_call<T>(p, ForwardCall<T>{out});
}

template <class T>
void routing_backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out) {
  driver::run_call<T>(p, BackwardCall<T>{in, out});
}

template void routing_forward<float>(const Problem&, const ForwardOutputs&);
template void routing_forward<double>(const Problem&, const ForwardOutputs&);
template void routing_backward<float>(const Problem&, const BackwardInputs&, const BackwardOutputs&);
template void routing_backward<double>(const Problem&, const BackwardInputs&, const BackwardOutputs&);

}  // namespace capsfast
