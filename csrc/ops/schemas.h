// The schemas of the ops, as the contracts in capsfast/ops make them (_register.py). They are defined when the library
// is loaded, not by Python, so that a process without Python finds the ops.
#pragma once

namespace capsfast {

constexpr const char* kSchemas[] = {
    "dynamic_routing(Tensor u, Tensor weight, Tensor? logits, Tensor? bias, Tensor? mask, Tensor? out_mask, "
    "int num_iterations, str softmax, str gradient, bool leaky, str squash, float eps, bool tf32, "
    "bool return_coupling) -> (Tensor, Tensor, Tensor, Tensor)",
    "dynamic_routing_backward(Tensor dv, Tensor? dcoupling, Tensor u, Tensor weight, Tensor? logits, Tensor? bias, "
    "Tensor? mask, Tensor? out_mask, Tensor coupling, Tensor s, Tensor norm, int num_iterations, str softmax, "
    "str gradient, bool leaky, str squash, float eps, bool tf32, bool need_u, bool need_weight, bool need_logits, "
    "bool need_bias) -> (Tensor, Tensor, Tensor, Tensor)",
    "em_update(Tensor mass, Tensor first, Tensor second, Tensor center, Tensor beta_a, Tensor beta_u, Tensor? last, "
    "Tensor? mask, Tensor? out_mask, float floor, float momentum, bool isotropic, str cost, float cost_scale, str "
    "nonlinearity, float inverse_temperature, bool final) -> (Tensor, Tensor, Tensor)",
    "em_update_backward(Tensor? dposes, Tensor? dprecision, Tensor? dscore, Tensor mass, Tensor first, Tensor second, "
    "Tensor center, Tensor beta_a, Tensor beta_u, Tensor? last, Tensor? mask, Tensor? out_mask, float floor, float "
    "momentum, bool isotropic, str cost, float cost_scale, str nonlinearity, float inverse_temperature, bool final, "
    "bool need_mass, bool need_first, bool need_second, bool need_center, bool need_beta_a, bool need_beta_u, bool "
    "need_last) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "route_votes(Tensor votes, Tensor? logits, Tensor? bias, Tensor? mask, Tensor? out_mask, SymInt J, "
    "int num_iterations, str softmax, str gradient, bool leaky, str squash, float eps, "
    "bool return_coupling) -> (Tensor, Tensor, Tensor, Tensor)",
    "route_votes_backward(Tensor dv, Tensor? dcoupling, Tensor votes, Tensor? logits, Tensor? bias, Tensor? mask, "
    "Tensor? out_mask, Tensor coupling, Tensor s, Tensor norm, SymInt J, int num_iterations, str softmax, "
    "str gradient, bool leaky, str squash, float eps, bool need_votes, bool need_logits, bool need_bias) -> (Tensor, "
    "Tensor, Tensor)",
    "routing_pass(Tensor u, Tensor weight, Tensor? query, Tensor? precision, Tensor? center, Tensor? prior, "
    "Tensor? logits, Tensor? activation, Tensor? lse, Tensor? mask, Tensor? out_mask, str normalize, bool leaky, "
    "bool with_second, bool tf32, bool return_weights, bool return_lse) -> (Tensor, Tensor, Tensor, Tensor, Tensor, "
    "Tensor)",
    "routing_pass_backward(Tensor? dmass, Tensor? dfirst, Tensor? dsecond, Tensor? dweights, Tensor? dlse_out, "
    "Tensor u, Tensor weight, Tensor? query, Tensor? precision, Tensor? center, Tensor? prior, Tensor? logits, "
    "Tensor? activation, Tensor? lse, Tensor? mask, Tensor? out_mask, Tensor mass, Tensor first, Tensor second, "
    "Tensor weights, Tensor lse_out, Tensor norm, str normalize, bool leaky, bool with_second, bool tf32, bool need_u, "
    "bool need_weight, bool need_query, bool need_precision, bool need_center, bool need_prior, bool need_logits, "
    "bool need_activation, bool need_lse) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "shared_routing(Tensor u, Tensor weight, Tensor? logits, Tensor? mask, Tensor? out_mask, SymInt J, "
    "int num_iterations, str gradient, bool accumulate, float scale, str squash, float eps, "
    "bool return_kept, bool return_all) -> (Tensor, Tensor)",
    "shared_routing_backward(Tensor dv, Tensor u, Tensor weight, Tensor? logits, Tensor? mask, Tensor? out_mask, "
    "Tensor kept, SymInt J, int num_iterations, str gradient, bool accumulate, float scale, str squash, float eps, "
    "bool need_u, bool need_weight, bool need_logits) -> (Tensor, Tensor, Tensor)",
    "votes_pass(Tensor votes, Tensor? query, Tensor? precision, Tensor? center, Tensor? prior, Tensor? logits, "
    "Tensor? activation, Tensor? lse, Tensor? mask, Tensor? out_mask, SymInt J, str normalize, bool leaky, "
    "bool with_second, bool return_weights, bool return_lse) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "votes_pass_backward(Tensor? dmass, Tensor? dfirst, Tensor? dsecond, Tensor? dweights, Tensor? dlse_out, "
    "Tensor votes, Tensor? query, Tensor? precision, Tensor? center, Tensor? prior, Tensor? logits, "
    "Tensor? activation, Tensor? lse, Tensor? mask, Tensor? out_mask, Tensor mass, Tensor first, Tensor second, "
    "Tensor weights, Tensor lse_out, Tensor norm, SymInt J, str normalize, bool leaky, bool with_second, bool need_votes, "
    "bool need_query, bool need_precision, bool need_center, bool need_prior, bool need_logits, "
    "bool need_activation, bool need_lse) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
};

}  // namespace capsfast
