// The routing ops: stable-ABI tensors in, tensors out. Python checks the arguments. Checked again here are only shapes,
// devices and dtypes, which would make the kernels read out of bounds.
//
// An Engine is where the ops run. It has the device's name `device`, `holds(tensor)`, `forward<T>` and `backward<T>`,
// where T is the type that sums are formed in. These take the problem, its outputs (the backward its inputs as well)
// and a tensor `like` whose device and allocator new memory comes from.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <tuple>

#include "options.h"
#include "routing.h"

namespace capsfast {

// Increased with every change of the signatures below. capsfast/native.py compares it with its BINDINGS, so that a
// library that was built for other signatures is refused instead of called with the wrong arguments.
constexpr int kBindings = 3;

namespace bindings {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using torch::headeronly::ScalarType;

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

inline View view_of(const Tensor& tensor) {
  View view{tensor.data_ptr(), storage_of(tensor), {0, 0, 0, 0}};
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) view.stride[axis] = tensor.stride(axis);
  return view;
}

struct Options {
  int64_t num_iterations;
  const std::string &softmax, &gradient;
  bool leaky;
  const std::string& squash;
  double eps;
};

inline ScalarType wide_type(const Tensor& like) {
  return like.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline Tensor empty(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType type) {
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(sizes.begin(), sizes.size()), type);
}

// A contiguous gradient of the shape of `tensor`, which `view` then describes; [0] if no gradient is wanted.
inline Tensor gradient_like(const Tensor& tensor, bool wanted, bool empty_problem, View* view) {
  if (!wanted) return empty(tensor, {0}, tensor.scalar_type());
  Tensor gradient = torch::stable::new_empty(tensor, tensor.sizes());
  // If any axis is empty, no kernel may run over what remains of the gradient, which then is 0.
  if (empty_problem) torch::stable::zero_(gradient);
  if (gradient.numel() > 0) *view = view_of(gradient);
  return gradient;
}

struct Saved {
  const Tensor& dv;
  const OptionalTensor& dcoupling;
  const Tensor &coupling, &s, &norm;
};

template <class Engine>
class Ops {
 public:
  static std::tuple<Tensor, Tensor, Tensor, Tensor> dynamic_routing(
      Tensor u,                 // [B, I, K]
      Tensor weight,            // [I or 1, J, D, K]
      OptionalTensor logits,    // [I, J] or [B, I, J]
      OptionalTensor bias,      // [J, D]
      OptionalTensor mask,      // [B, I]
      OptionalTensor out_mask,  // [B, J]
      int64_t num_iterations, std::string softmax, std::string gradient, bool leaky, std::string squash, double eps,
      bool tf32, bool return_coupling) {
    Problem p = problem_of(u, weight);
    p.tf32 = tf32;
    fill(p, {num_iterations, softmax, gradient, leaky, squash, eps}, logits, bias, mask, out_mask);
    return forward(p, u, return_coupling);
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> dynamic_routing_backward(
      Tensor dv,                 // [B, J, D]
      OptionalTensor dcoupling,  // [B, I, J]
      Tensor u, Tensor weight, OptionalTensor logits, OptionalTensor bias, OptionalTensor mask, OptionalTensor out_mask,
      Tensor coupling,  // [B, I, J], or empty
      Tensor s,         // [r, B, J, D]
      Tensor norm,      // [2, r, B, J], or empty
      int64_t num_iterations, std::string softmax, std::string gradient, bool leaky, std::string squash, double eps,
      bool tf32, bool need_u, bool need_weight, bool need_logits, bool need_bias) {
    Problem p = problem_of(u, weight);
    p.tf32 = tf32;
    fill(p, {num_iterations, softmax, gradient, leaky, squash, eps}, logits, bias, mask, out_mask);
    BackwardOutputs out;
    Tensor du = gradient_like(u, need_u, p.empty(), &out.du);
    Tensor dweight = gradient_like(weight, need_weight, p.empty(), &out.dweight);
    Tensor dlogits = gradient_like(logits.value_or(u), need_logits && logits.has_value(), p.empty(), &out.dlogits);
    Tensor dbias = gradient_like(bias.value_or(u), need_bias && bias.has_value(), p.empty(), &out.dbias);
    out.per_sample_logits = logits.has_value() && logits->dim() == 3;
    out.weight_rows = weight.size(0);
    backward(p, u, {dv, dcoupling, coupling, s, norm}, out);
    return {du, dweight, dlogits, dbias};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> route_votes(
      Tensor votes,  // [B, I, J or 1, D]
      OptionalTensor logits, OptionalTensor bias, OptionalTensor mask, OptionalTensor out_mask, int64_t J,
      int64_t num_iterations, std::string softmax, std::string gradient, bool leaky, std::string squash, double eps, bool return_coupling) {
    Problem p = problem_of(votes, J);
    fill(p, {num_iterations, softmax, gradient, leaky, squash, eps}, logits, bias, mask, out_mask);
    return forward(p, votes, return_coupling);
  }

  static std::tuple<Tensor, Tensor, Tensor> route_votes_backward(
      Tensor dv, OptionalTensor dcoupling, Tensor votes, OptionalTensor logits, OptionalTensor bias,
      OptionalTensor mask, OptionalTensor out_mask, Tensor coupling, Tensor s, Tensor norm, int64_t J,
      int64_t num_iterations, std::string softmax, std::string gradient, bool leaky, std::string squash, double eps, bool need_votes,
      bool need_logits, bool need_bias) {
    Problem p = problem_of(votes, J);
    fill(p, {num_iterations, softmax, gradient, leaky, squash, eps}, logits, bias, mask, out_mask);
    BackwardOutputs out;
    Tensor dvotes = gradient_like(votes, need_votes, p.empty(), &out.dweight);
    Tensor dlogits = gradient_like(logits.value_or(votes), need_logits && logits.has_value(), p.empty(), &out.dlogits);
    Tensor dbias = gradient_like(bias.value_or(votes), need_bias && bias.has_value(), p.empty(), &out.dbias);
    out.per_sample_logits = logits.has_value() && logits->dim() == 3;
    backward(p, votes, {dv, dcoupling, coupling, s, norm}, out);
    return {dvotes, dlogits, dbias};
  }

 private:
  static void expect(const char* name, const Tensor& tensor, std::initializer_list<int64_t> sizes) {
    bool same = tensor.dim() == static_cast<int64_t>(sizes.size());
    int64_t axis = 0;
    for (const int64_t size : sizes) same = same && tensor.size(axis++) == size;
    STD_TORCH_CHECK(same, "capsfast: ", name, " has a shape that does not fit the other arguments");
    STD_TORCH_CHECK(Engine::holds(tensor), "capsfast: ", name, " must be a ", Engine::device, " tensor");
  }

  static MaskView mask_of(const char* name, const OptionalTensor& mask, int64_t rows, int64_t columns) {
    if (!mask.has_value()) return {};
    expect(name, *mask, {rows, columns});
    STD_TORCH_CHECK(mask->scalar_type() == ScalarType::Bool, "capsfast: ", name, " must be bool");
    return {static_cast<const uint8_t*>(mask->data_ptr()), {mask->stride(0), mask->stride(1)}};
  }

  // Fills in everything but u, weight and votes. The sizes in p are set already.
  static void fill(Problem& p, const Options& options, const OptionalTensor& logits, const OptionalTensor& bias,
                   const OptionalTensor& mask, const OptionalTensor& out_mask) {
    STD_TORCH_CHECK(options.num_iterations >= 1, "capsfast: num_iterations must be at least 1");
    p.iterations = options.num_iterations;
    p.softmax_in = softmax_in_of(options.softmax);
    p.gradient_last = gradient_last_of(options.gradient);
    p.leaky = options.leaky;
    p.squash = squash_of(options.squash);
    p.eps = options.eps;
    if (logits.has_value()) {
      const bool per_sample = logits->dim() == 3;
      if (per_sample) {
        expect("logits", *logits, {p.B, p.I, p.J});
      } else {
        expect("logits", *logits, {p.I, p.J});
      }
      p.logits = view_of(*logits);
      if (!per_sample) {
        p.logits.stride[2] = p.logits.stride[1];
        p.logits.stride[1] = p.logits.stride[0];
        p.logits.stride[0] = 0;
      }
    }
    if (bias.has_value()) {
      expect("bias", *bias, {p.J, p.D});
      p.bias = view_of(*bias);
    }
    p.mask = mask_of("mask", mask, p.B, p.I);
    p.out_mask = mask_of("out_mask", out_mask, p.B, p.J);
  }

  static Problem problem_of(const Tensor& u, const Tensor& weight) {
    STD_TORCH_CHECK(u.dim() == 3 && weight.dim() == 4, "capsfast: u must be [B, I, K], weight [I, J, D, K]");
    Problem p;
    p.B = u.size(0);
    p.I = u.size(1);
    p.K = u.size(2);
    p.J = weight.size(1);
    p.D = weight.size(2);
    const int64_t rows = weight.size(0);
    STD_TORCH_CHECK(rows == 1 || rows == p.I, "capsfast: weight must have 1 or I rows");
    expect("weight", weight, {rows, p.J, p.D, p.K});
    expect("u", u, {p.B, p.I, p.K});
    STD_TORCH_CHECK(u.scalar_type() == weight.scalar_type(), "capsfast: u and weight must have one dtype");
    p.u = view_of(u);
    p.weight = view_of(weight);
    p.shared_weight = rows == 1;
    if (p.shared_weight) p.weight.stride[0] = 0;
    return p;
  }

  static Problem problem_of(const Tensor& votes, int64_t J) {
    STD_TORCH_CHECK(votes.dim() == 4, "capsfast: votes must be [B, I, J or 1, D]");
    STD_TORCH_CHECK(Engine::holds(votes), "capsfast: votes must be a ", Engine::device, " tensor");
    Problem p;
    p.B = votes.size(0);
    p.I = votes.size(1);
    p.J = J;
    p.D = votes.size(3);
    p.votes_given = true;
    p.shared_outputs = votes.size(2) != J;
    STD_TORCH_CHECK(J >= 0 && (!p.shared_outputs || votes.size(2) == 1), "capsfast: votes must have 1 or J outputs");
    STD_TORCH_CHECK(
        !p.shared_outputs || Engine::kSharedOutputs, "capsfast: ", Engine::device, " votes must have J outputs");
    p.votes = view_of(votes);
    if (p.shared_outputs) p.votes.stride[2] = 0;
    return p;
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> forward(const Problem& p, const Tensor& like,
                                                            bool return_coupling) {
    const ScalarType type = like.scalar_type(), wide = wide_type(like);
    Tensor v = empty(like, {p.B, p.J, p.D}, type);
    Tensor coupling = return_coupling ? empty(like, {p.B, p.I, p.J}, type) : empty(like, {0}, type);
    Tensor s = empty(like, {p.iterations, p.B, p.J, p.D}, wide);
    Tensor norm = p.softmax_in ? empty(like, {2, p.iterations, p.B, p.J}, wide) : empty(like, {0}, wide);
    ForwardOutputs out;
    out.batch = p.B;
    out.v = view_of(v);
    if (return_coupling && coupling.numel() > 0) out.coupling = view_of(coupling);
    out.s = s.data_ptr();
    out.norm = norm.data_ptr();
    if (wide == ScalarType::Double) {
      Engine::template forward<double>(p, out, like);
    } else {
      Engine::template forward<float>(p, out, like);
    }
    return {v, coupling, s, norm};
  }

  static void backward(const Problem& p, const Tensor& like, const Saved& saved, const BackwardOutputs& out) {
    expect("dv", saved.dv, {p.B, p.J, p.D});
    expect("s", saved.s, {p.iterations, p.B, p.J, p.D});
    STD_TORCH_CHECK(saved.s.scalar_type() == wide_type(like), "capsfast: s must have the dtype sums are formed in");
    BackwardInputs in;
    in.batch = p.B;
    in.dv = view_of(saved.dv);
    const Tensor s = torch::stable::contiguous(saved.s), norm = torch::stable::contiguous(saved.norm);
    in.s = s.data_ptr();
    if (p.softmax_in) {
      expect("norm", saved.norm, {2, p.iterations, p.B, p.J});
      STD_TORCH_CHECK(
          saved.norm.scalar_type() == wide_type(like), "capsfast: norm must have the dtype sums are formed in");
      in.norm = norm.data_ptr();
    }
    if (saved.dcoupling.has_value()) {
      expect("dcoupling", *saved.dcoupling, {p.B, p.I, p.J});
      expect("coupling", saved.coupling, {p.B, p.I, p.J});
      in.dcoupling = view_of(*saved.dcoupling);
      in.coupling = view_of(saved.coupling);
    }
    if (wide_type(like) == ScalarType::Double) {
      Engine::template backward<double>(p, in, out, like);
    } else {
      Engine::template backward<float>(p, in, out, like);
    }
  }
};

}  // namespace bindings

// Registers the ops under the names of the schemas in schemas.h, each preceded by `prefix`.
template <class Engine, class Library>
void register_ops(Library& library, const std::string& prefix = "") {
  library.impl((prefix + "dynamic_routing").c_str(), TORCH_BOX(&bindings::Ops<Engine>::dynamic_routing));
  library.impl(
      (prefix + "dynamic_routing_backward").c_str(), TORCH_BOX(&bindings::Ops<Engine>::dynamic_routing_backward));
  library.impl((prefix + "route_votes").c_str(), TORCH_BOX(&bindings::Ops<Engine>::route_votes));
  library.impl((prefix + "route_votes_backward").c_str(), TORCH_BOX(&bindings::Ops<Engine>::route_votes_backward));
}

}  // namespace capsfast
