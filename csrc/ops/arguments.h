// Turns what torch hands to an op into what the kernels take: arguments off the stack, tensors of the stable ABI as
// views.
//
// Python checks the arguments. This file checks again only what could make the kernels read out of bounds: shapes,
// devices and dtypes.
//
// An Engine is where an op runs. It has the name of the device, `device`, and `holds(tensor)`. Its functions
// `forward<T>`, `backward<T>`, `pass_forward<T>` and `pass_backward<T>` form sums in type T. They take the problem, its
// inputs and outputs, and a tensor `like`: new memory comes from the device and allocator of `like`.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <cstring>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "../new_tensor.h"
#include "cpu/memory.h"
#include "problem.h"

namespace capsfast {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using torch::headeronly::ScalarType;

// The arguments of a call in the order of its schema; then its results.
class Stack {
 public:
  Stack(StableIValue* values, uint64_t arguments, uint64_t results)
      : values_(values), arguments_(arguments), results_(results) {}

  template <class T>
  Stack& operator>>(T& argument) {
    STD_TORCH_CHECK(taken_ < arguments_, "capsfast: a schema and its kernel differ");
    argument = torch::stable::detail::to<T>(values_[taken_++]);
    check_device(argument);
    return *this;
  }

  // Which of `count` gradients are needed.
  std::vector<bool> needed(size_t count) {
    std::vector<bool> found;
    *this >> found;
    STD_TORCH_CHECK(found.size() == count, "capsfast: needed must have ", count, " entries, got ", found.size());
    return found;
  }

  void give(std::initializer_list<Tensor> results) {
    STD_TORCH_CHECK(taken_ == arguments_ && results.size() == results_, "capsfast: a schema and its kernel differ");
    for (const Tensor& result : results) *values_++ = torch::stable::detail::from(result);
  }

 private:
  // All tensors must be on one device: the kernels of one GPU would read the memory of another.
  void check_device(const Tensor& tensor) {
    const int32_t device = tensor.get_device_index();  // -1 on the CPU
    if (device_ < 0) device_ = device;
    STD_TORCH_CHECK(device < 0 || device == device_, "capsfast: tensors must be on one device, got cuda:", device_,
                    " and cuda:", device);
  }
  void check_device(const OptionalTensor& tensor) {
    if (tensor.has_value()) check_device(*tensor);
  }
  template <class T>
  void check_device(const T&) {}

  StableIValue* values_;
  const uint64_t arguments_, results_;
  uint64_t taken_ = 0;
  int32_t device_ = -1;
};

// A kernel as torch calls it.
template <void (*kernel)(Stack&)>
void boxed(StableIValue* values, uint64_t arguments, uint64_t results) {
  Stack stack(values, arguments, results);
  kernel(stack);
}

// The enumerator of a word of a schema: the word's place among `words`. capsfast/calls/options.py lists the same words.
template <class E, size_t count>
E choice_of(const char* option, const std::string& word, const char* const (&words)[count]) {
  for (size_t n = 0; n < count; ++n) {
    if (word == words[n]) return static_cast<E>(n);
  }
  STD_TORCH_CHECK(false, "capsfast: ", option, " must not be '", word, "'");
  return E{};
}

template <class F>
void with_type(ScalarType type, const F& f) {
  type == ScalarType::Double ? f(double{}) : f(float{});
}

inline Storage storage_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return Storage::f32;
    case ScalarType::Double:
      return Storage::f64;
    case ScalarType::BFloat16:
      return Storage::bf16;
    case ScalarType::Half:
      return Storage::f16;
    default: {
      STD_TORCH_CHECK(false, "capsfast: tensors must be float32, float64, bfloat16 or float16");
    }
  }
  return Storage::f32;
}

inline View view_of(const Tensor& tensor, bool positions = false) {
  View view{tensor.data_ptr(), storage_of(tensor), {0, 0, 0, 0}};
  const int64_t axes = tensor.dim() - (positions ? 1 : 0);
  for (int64_t axis = 0; axis < axes; ++axis) view.stride[axis] = tensor.stride(axis);
  if (positions) view.position = tensor.stride(axes);
  return view;
}

inline ScalarType wide_type(const Tensor& like) {
  return like.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// A new contiguous tensor on the device of `like`.
inline Tensor empty(const Tensor& like, const int64_t* sizes, size_t axes, ScalarType type) {
  const double bytes = type == ScalarType::Double ? 8 : type == ScalarType::Float ? 4 : 2;
  const auto dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  Tensor made = new_tensor(like, sizes, axes, dtype, bytes);
  if (poisoned() && made.is_cpu()) std::memset(made.data_ptr(), 0xff, static_cast<size_t>(made.numel() * bytes));
  return made;
}

// A new tensor of these sizes, with a last axis of positions if there are any.
inline Tensor empty(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType type, int64_t positions = -1) {
  int64_t all[kMostAxes];
  size_t axes = 0;
  for (const int64_t size : sizes) all[axes++] = size;
  if (positions >= 0) all[axes++] = positions;
  return empty(like, all, axes, type);
}

// A contiguous gradient of the shape of `tensor`, which `view` then describes; [0] if no gradient is wanted. positions:
// the tensor ends in an axis of positions. huge_pages: ask for huge pages. dvotes, as large as the votes, does without:
// if a virtual machine had given memory back to its host, fresh huge pages cost more than small pages.
inline Tensor gradient_like(const Tensor& tensor, bool wanted, bool empty_problem, View* view, bool positions = false,
                            bool huge_pages = true) {
  if (!wanted) return empty(tensor, {0}, tensor.scalar_type());
  Tensor gradient = empty(tensor, tensor.sizes().data(), tensor.sizes().size(), tensor.scalar_type());
  if (huge_pages && gradient.is_cpu())
    advise_huge_pages(gradient.data_ptr(), static_cast<size_t>(gradient.numel()) * size_of(storage_of(gradient)));
  // If any axis of the problem is empty, perhaps no kernel writes the gradient, which is 0.
  if (empty_problem) torch::stable::zero_(gradient);
  if (gradient.numel() > 0) *view = view_of(gradient, positions);
  return gradient;
}

// The gradients of the tensors that make the votes.
struct VoteGradients {
  Tensor u, weight;
};

// a: a struct with u and weight. If u holds votes, the kernels write dvotes instead of dW.
template <class A>
VoteGradients gradients_of(const A& a, const Problem& p, const std::vector<bool>& needed, BackwardOutputs& out) {
  out.weight_rows = a.weight.has_value() ? a.weight->size(0) : 0;
  if (!a.weight.has_value())
    return {gradient_like(a.u, needed[0], p.empty(), &out.dweight, p.has_positions(), false),
            empty(a.u, {0}, a.u.scalar_type())};
  return {
      gradient_like(a.u, needed[0], p.empty(), &out.du), gradient_like(*a.weight, needed[1], p.empty(), &out.dweight)};
}

// The gradient of an argument that may be absent. per_sample: the argument has an axis B.
inline Tensor gradient_of(const OptionalTensor& tensor, const Tensor& u, bool wanted, const Problem& p, View* view,
                          bool per_sample = true) {
  const bool positions = per_sample && p.has_positions();
  return gradient_like(tensor.value_or(u), wanted && tensor.has_value(), p.empty(), view, positions);
}

template <class Engine>
struct Arguments {
  static void expect(const char* name, const Tensor& tensor, std::initializer_list<int64_t> sizes,
                     int64_t positions = -1) {
    const int64_t axes = static_cast<int64_t>(sizes.size());
    bool same = tensor.dim() == axes + (positions < 0 ? 0 : 1);
    int64_t axis = 0;
    for (const int64_t size : sizes) same = same && tensor.size(axis++) == size;
    same = same && (positions < 0 || tensor.size(axes) == positions);
    STD_TORCH_CHECK(same, "capsfast: ", name, " has a shape that does not fit the other arguments");
    STD_TORCH_CHECK(Engine::holds(tensor), "capsfast: ", name, " must be a ", Engine::device, " tensor");
  }

  // A tensor of these sizes, with or without positions, as a view; without data if it was not given.
  static View view(const char* name, const OptionalTensor& tensor, const Problem& p,
                   std::initializer_list<int64_t> sizes) {
    if (!tensor.has_value()) return {};
    expect(name, *tensor, sizes, p.positions);
    return view_of(*tensor, p.has_positions());
  }

  // A saved tensor in the type that sums are formed in, made contiguous.
  static const void* saved(const char* name, Tensor& tensor, const Tensor& u, std::initializer_list<int64_t> sizes) {
    expect(name, tensor, sizes);
    STD_TORCH_CHECK(
        tensor.scalar_type() == wide_type(u), "capsfast: ", name, " must have the dtype sums are formed in");
    if (!tensor.is_contiguous()) tensor = torch::stable::contiguous(tensor);
    return tensor.data_ptr();
  }

  // The gradient of the result, 0 if there is none.
  static View upstream(OptionalTensor& dv, const Tensor& u, const Problem& p) {
    if (!dv.has_value()) {
      dv = empty(u, {p.B, p.J, p.D}, u.scalar_type(), p.positions);
      torch::stable::zero_(*dv);
    }
    return view("dv", dv, p, {p.B, p.J, p.D});
  }

  static MaskView mask_of(const char* name, const OptionalTensor& mask, const Problem& p, int64_t columns) {
    if (!mask.has_value()) return {};
    expect(name, *mask, {p.B, columns}, p.positions);
    STD_TORCH_CHECK(mask->scalar_type() == ScalarType::Bool, "capsfast: ", name, " must be bool");
    return {static_cast<const uint8_t*>(mask->data_ptr()),
            {mask->stride(0), mask->stride(1)},
            p.has_positions() ? mask->stride(2) : 0};
  }

  static void add_logits_and_masks(Problem& p, const OptionalTensor& logits, const OptionalTensor& mask,
                                   const OptionalTensor& out_mask) {
    if (logits.has_value()) {
      if (logits->dim() > 2) {
        p.logits = view("logits", logits, p, {p.B, p.I, p.J});
      } else {
        expect("logits", *logits, {p.I, p.J});
        p.logits = view_of(*logits);
        p.logits.stride[2] = p.logits.stride[1];
        p.logits.stride[1] = p.logits.stride[0];
        p.logits.stride[0] = 0;
      }
    }
    p.mask = mask_of("mask", mask, p, p.I);
    p.out_mask = mask_of("out_mask", out_mask, p, p.J);
  }

  // The sizes and the votes. Votes are made from u and weight; without a weight, u holds the votes for J output
  // capsules.
  static Problem problem_of(const Tensor& u, const OptionalTensor& weight, std::optional<int64_t> J) {
    if (!weight.has_value()) return of_votes(u, J.value_or(u.dim() > 2 ? u.size(2) : 0));
    Problem p = of_product(u, *weight);
    p.shared_outputs = J.has_value() && *J != p.J;
    STD_TORCH_CHECK(!p.shared_outputs || (p.J == 1 && *J >= 0), "capsfast: weight must have 1 or J outputs");
    p.J = J.value_or(p.J);
    return p;
  }

 private:
  static Problem of_product(const Tensor& u, const Tensor& weight) {
    STD_TORCH_CHECK(u.dim() == 3 && weight.dim() == 4, "capsfast: u must be [B, I, P K], weight [I, J, R, K]");
    Problem p;
    p.B = u.size(0);
    p.I = u.size(1);
    p.J = weight.size(1);
    p.K = weight.size(3);
    p.P = p.K == 0 ? 1 : u.size(2) / p.K;
    p.D = p.P * weight.size(2);
    const int64_t rows = weight.size(0);
    STD_TORCH_CHECK(rows == 1 || rows == p.I, "capsfast: weight must have 1 or I rows");
    STD_TORCH_CHECK(p.P >= 1 && p.P * p.K == u.size(2), "capsfast: u and weight must agree in K");
    STD_TORCH_CHECK(p.P == 1 || Engine::kPoseMatrices, "capsfast: ", Engine::device, " poses must be vectors");
    expect("weight", weight, {rows, p.J, p.R(), p.K});
    expect("u", u, {p.B, p.I, p.pose_size()});
    STD_TORCH_CHECK(u.scalar_type() == weight.scalar_type(), "capsfast: u and weight must have one dtype");
    p.u = view_of(u);
    p.weight = view_of(weight);
    p.dweight = p.weight.storage;
    p.shared_weight = rows == 1;
    if (p.shared_weight) p.weight.stride[0] = 0;
    return p;
  }

  static Problem of_votes(const Tensor& votes, int64_t J) {
    const bool positions = votes.dim() == 5;
    STD_TORCH_CHECK(votes.dim() == 4 || positions, "capsfast: votes must be [B, I, J or 1, D] or [B, I, J, D, S]");
    STD_TORCH_CHECK(!positions || Engine::kPositions, "capsfast: ", Engine::device, " votes must have no positions");
    STD_TORCH_CHECK(Engine::holds(votes), "capsfast: votes must be a ", Engine::device, " tensor");
    Problem p;
    p.B = votes.size(0);
    p.I = votes.size(1);
    p.J = J;
    p.D = votes.size(3);
    p.votes_given = true;
    if (positions) p.positions = votes.size(4);
    p.shared_outputs = votes.size(2) != J;
    STD_TORCH_CHECK(!positions || !p.shared_outputs, "capsfast: votes with positions must have J outputs");
    STD_TORCH_CHECK(J >= 0 && (!p.shared_outputs || votes.size(2) == 1), "capsfast: votes must have 1 or J outputs");
    STD_TORCH_CHECK(
        !p.shared_outputs || Engine::kSharedOutputs, "capsfast: ", Engine::device, " votes must have J outputs");
    p.votes = view_of(votes, positions);
    if (p.shared_outputs) p.votes.stride[2] = 0;
    return p;
  }
};

}  // namespace capsfast
