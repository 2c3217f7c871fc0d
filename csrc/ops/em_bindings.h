// The op of EM routing's M-step: stable-ABI tensors in, tensors out. It runs on the CPU alone.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "arguments.h"
#include "cpu/em_update.h"
#include "cpu/engine.h"

namespace capsfast {
namespace bindings {

class EmOps : Arguments<CpuEngine> {
  using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

 public:
  static std::tuple<Tensor, Tensor, Tensor> em_update(
      Tensor mass,              // [B, J]
      Tensor first,             // [B, J, D]
      Tensor second,            // [B, J, D]
      Tensor center,            // [B, J, D]
      Tensor beta_a,            // [J]
      Tensor beta_u,            // [J] or [J, D]
      OptionalTensor last,      // [B, J, D]
      OptionalTensor out_mask,  // [B, J]
      double floor, double momentum, bool isotropic, std::string cost, double cost_scale, std::string nonlinearity,
      double inverse_temperature, bool final) {
    const Call call(mass, first, second, center, beta_a, beta_u, last, out_mask,
                    {floor, momentum, isotropic, cost, cost_scale, nonlinearity, inverse_temperature, final});
    const EmProblem& p = call.p;
    Tensor poses = empty(mass, {p.B, p.J, p.D}, call.type), score = empty(mass, {p.B, p.J}, call.type),
           precision = final ? empty(mass, {0}, call.type) : empty(mass, {p.B, p.J, p.D}, call.type);
    call.with_type([&](auto zero) {
      using T = decltype(zero);
      capsfast::em_update<T>(
          p, call.inputs<T>(), {data<T>(poses), final ? nullptr : data<T>(precision), data<T>(score)});
    });
    return {poses, precision, score};
  }

  static Gradients em_update_backward(
      OptionalTensor dposes,      // [B, J, D]
      OptionalTensor dprecision,  // [B, J, D]
      OptionalTensor dscore,      // [B, J]
      Tensor mass, Tensor first, Tensor second, Tensor center, Tensor beta_a, Tensor beta_u, OptionalTensor last,
      OptionalTensor out_mask, double floor, double momentum, bool isotropic, std::string cost, double cost_scale,
      std::string nonlinearity, double inverse_temperature, bool final, std::vector<bool> needed) {
    const Call call(mass, first, second, center, beta_a, beta_u, last, out_mask,
                    {floor, momentum, isotropic, cost, cost_scale, nonlinearity, inverse_temperature, final});
    const EmProblem& p = call.p;
    const bool need_mass = needed[0], need_first = needed[1], need_second = needed[2], need_center = needed[3],
               need_beta_a = needed[4], need_beta_u = needed[5], need_last = needed[6];
    STD_TORCH_CHECK(!final || !dprecision.has_value(), "capsfast: the final em_update has no precision");
    const OptionalTensor given[] = {
        call.taken("dposes", dposes, {p.B, p.J, p.D}), call.taken("dprecision", dprecision, {p.B, p.J, p.D}),
        call.taken("dscore", dscore, {p.B, p.J})};
    const auto gradient = [&](const Tensor& of, bool wanted) {
      return wanted ? torch::stable::new_empty(of, of.sizes()) : empty(of, {0}, call.type);
    };
    // Contiguous, whatever the strides of the arguments are.
    Tensor dmass = gradient(call.mass, need_mass), dfirst = gradient(call.first, need_first),
           dsecond = gradient(call.second, need_second), dcenter = gradient(call.center, need_center),
           dbeta_a = gradient(call.beta_a, need_beta_a), dbeta_u = gradient(call.beta_u, need_beta_u);
    const bool of_last = need_last && last.has_value();
    Tensor dlast = gradient(of_last ? *call.last : call.mass, of_last);
    call.with_type([&](auto zero) {
      using T = decltype(zero);
      const auto to = [](const Tensor& tensor, bool wanted) { return wanted ? data<T>(tensor) : nullptr; };
      capsfast::em_update_backward<T>(
          p, call.inputs<T>(),
          {data<T>(given[0]), data<T>(given[1]), data<T>(given[2]), to(dmass, need_mass), to(dfirst, need_first),
           to(dsecond, need_second), to(dcenter, need_center), to(dlast, of_last), to(dbeta_a, need_beta_a),
           to(dbeta_u, need_beta_u)});
    });
    return {dmass, dfirst, dsecond, dcenter, dbeta_a, dbeta_u, dlast};
  }

 private:
  struct Options {
    double floor, momentum;
    bool isotropic;
    const std::string& cost;
    double cost_scale;
    const std::string& nonlinearity;
    double inverse_temperature;
    bool final;
  };

  template <class T>
  static T* data(const Tensor& tensor) {
    return static_cast<T*>(tensor.data_ptr());
  }
  template <class T>
  static const T* data(const OptionalTensor& tensor) {
    return tensor.has_value() ? data<T>(*tensor) : nullptr;
  }

  // The problem, and the tensors that it is about, contiguous.
  struct Call {
    EmProblem p;
    ScalarType type;
    Tensor mass, first, second, center, beta_a, beta_u;
    OptionalTensor last;

    Call(const Tensor& mass_, const Tensor& first_, const Tensor& second_, const Tensor& center_, const Tensor& beta_a_,
         const Tensor& beta_u_, const OptionalTensor& last_, const OptionalTensor& out_mask, const Options& o)
        : type(mass_.scalar_type()),
          mass(torch::stable::contiguous(mass_)),
          first(torch::stable::contiguous(first_)),
          second(torch::stable::contiguous(second_)),
          center(torch::stable::contiguous(center_)),
          beta_a(torch::stable::contiguous(beta_a_)),
          beta_u(torch::stable::contiguous(beta_u_)) {
      STD_TORCH_CHECK(
          type == ScalarType::Float || type == ScalarType::Double, "capsfast: em_update takes float32 and float64");
      STD_TORCH_CHECK(first.dim() == 3, "capsfast: first must be [B, J, D]");
      p.B = first.size(0), p.J = first.size(1), p.D = first.size(2);
      check("mass", mass, {p.B, p.J});
      for (const Tensor* each : {&first, &second, &center}) check("first, second and center", *each, {p.B, p.J, p.D});
      check("beta_a", beta_a, {p.J});
      p.component_beta = beta_u.dim() == 2;
      p.component_beta ? check("beta_u", beta_u, {p.J, p.D}) : check("beta_u", beta_u, {p.J});
      last = taken("last", last_, {p.B, p.J, p.D});
      Problem masks;
      masks.B = p.B, masks.J = p.J;
      p.out_mask = mask_of("out_mask", out_mask, masks, p.J);
      STD_TORCH_CHECK(o.cost == "variance" || o.cost == "mass", "capsfast: cost must be 'variance' or 'mass'");
      STD_TORCH_CHECK(o.nonlinearity == "sigmoid" || o.nonlinearity == "softmax",
                      "capsfast: nonlinearity must be 'sigmoid' or 'softmax'");
      p.floor = o.floor, p.momentum = o.momentum, p.inverse_temperature = o.inverse_temperature;
      p.cost_scale = o.cost_scale, p.isotropic = o.isotropic, p.cost_of_variance = o.cost == "variance";
      p.softmax = o.nonlinearity == "softmax", p.final = o.final;
    }

    void check(const char* name, const Tensor& tensor, std::initializer_list<int64_t> sizes) const {
      expect(name, tensor, sizes);
      STD_TORCH_CHECK(tensor.scalar_type() == type, "capsfast: ", name, " must have the dtype of mass");
    }

    OptionalTensor taken(const char* name, const OptionalTensor& tensor, std::initializer_list<int64_t> sizes) const {
      if (!tensor.has_value()) return {};
      check(name, *tensor, sizes);
      return torch::stable::contiguous(*tensor);
    }

    template <class T>
    EmInputs<T> inputs() const {
      return {data<T>(mass), data<T>(first),  data<T>(second), data<T>(center),
              data<T>(last), data<T>(beta_a), data<T>(beta_u)};
    }

    template <class F>
    void with_type(const F& f) const {
      type == ScalarType::Double ? f(double{}) : f(float{});
    }
  };
};

}  // namespace bindings

template <class Library>
void register_em_op(Library& library) {
  library.impl("em_update", TORCH_BOX(&bindings::EmOps::em_update));
  library.impl("em_update_backward", TORCH_BOX(&bindings::EmOps::em_update_backward));
}

}  // namespace capsfast
