// The arrays that score the votes of a pass, in the layout of the passes.
#pragma once

#include "context.h"
#include "routing.h"

namespace capsfast::driver {

// A form of the votes: a linear and, if the pass is quadratic, a square part, and a constant if there is one.
template <class T>
class FormArrays {
 public:
  FormArrays(const Context<T>& context, const View& linear, const View& square, T factor, const View& constant)
      : size_(context.layout.vectors()),
        quadratic_(context.p.quadratic),
        constant_(constant.data != nullptr),
        squares_(linear.data == nullptr),
        memory_((quadratic_ ? 2 : 1) * size_ + (constant_ ? context.layout.scalars() : 0)) {
    const Problem& p = context.p;
    context.load(linear, p.J, p.D, T(1), memory_.get());
    if (quadratic_) context.load(square, p.J, p.D, factor, memory_.get() + size_);
    if (constant_) context.load(constant, p.J, 1, T(1), memory_.get() + (quadratic_ ? 2 : 1) * size_);
  }
  Form<T> form() const {
    const T* linear = memory_.get();
    return {linear, quadratic_ ? linear + size_ : nullptr, constant_ ? linear + (quadratic_ ? 2 : 1) * size_ : nullptr,
            squares_};
  }

 private:
  int64_t size_;
  bool quadratic_, constant_, squares_;
  Buffer<T> memory_;
};

// The score of a pass and the center of its votes.
template <class T>
class Score {
 public:
  Score(const Context<T>& context, const PassInputs& in)
      : scored_(in.query.data != nullptr || in.precision.data != nullptr || in.prior.data != nullptr),
        arrays_(context, in.query, in.precision, T(-0.5), in.prior),
        center_(context.p.quadratic ? context.layout.vectors() : 0) {
    if (context.p.quadratic) context.load(in.center, context.p.J, context.p.D, T(1), center_.get());
  }
  bool scored() const { return scored_; }
  Form<T> form() const { return scored_ ? arrays_.form() : Form<T>{}; }
  const T* center(const Problem& p) const { return p.quadratic ? center_.get() : nullptr; }

 private:
  bool scored_;
  FormArrays<T> arrays_;
  Buffer<T> center_;
};

}  // namespace capsfast::driver
