// The CPU kernels as ops: stable-ABI tensors in, tensors out. Arguments were checked in Python; what is
// checked here is what would make the kernels read out of bounds.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>

namespace capsfast {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

std::tuple<Tensor, Tensor, Tensor, Tensor> dynamic_routing_cpu(
    Tensor u,                 // [B, I, K]
    Tensor weight,            // [I or 1, J, D, K]
    OptionalTensor logits,    // [I, J] or [B, I, J]
    OptionalTensor bias,      // [J, D]
    OptionalTensor mask,      // [B, I]
    OptionalTensor out_mask,  // [B, J]
    int64_t num_iterations,
    std::string softmax,
    std::string gradient,
    bool leaky,
    std::string squash,
    double eps,
    bool return_coupling);

std::tuple<Tensor, Tensor, Tensor, Tensor> dynamic_routing_backward_cpu(
    Tensor dv,                 // [B, J, D]
    OptionalTensor dcoupling,  // [B, I, J]
    Tensor u,
    Tensor weight,
    OptionalTensor logits,
    OptionalTensor bias,
    OptionalTensor mask,
    OptionalTensor out_mask,
    Tensor coupling,  // [B, I, J], or empty
    Tensor s,         // [r, B, J, D]
    Tensor norm,      // [2, r, B, J], or empty
    int64_t num_iterations,
    std::string softmax,
    std::string gradient,
    bool leaky,
    std::string squash,
    double eps,
    bool need_u,
    bool need_weight,
    bool need_logits,
    bool need_bias);

std::tuple<Tensor, Tensor, Tensor, Tensor> route_votes_cpu(
    Tensor votes,  // [B, I, J, D]
    OptionalTensor logits,
    OptionalTensor bias,
    OptionalTensor mask,
    OptionalTensor out_mask,
    int64_t num_iterations,
    std::string softmax,
    std::string gradient,
    bool leaky,
    std::string squash,
    double eps,
    bool return_coupling);

std::tuple<Tensor, Tensor, Tensor> route_votes_backward_cpu(
    Tensor dv,
    OptionalTensor dcoupling,
    Tensor votes,
    OptionalTensor logits,
    OptionalTensor bias,
    OptionalTensor mask,
    OptionalTensor out_mask,
    Tensor coupling,
    Tensor s,
    Tensor norm,
    int64_t num_iterations,
    std::string softmax,
    std::string gradient,
    bool leaky,
    std::string squash,
    double eps,
    bool need_votes,
    bool need_logits,
    bool need_bias);

}  // namespace capsfast
