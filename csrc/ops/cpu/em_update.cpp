// The op em_update and its backward: one step of EM routing, which em_update.h describes. CUDA tensors take Triton's
// kernel or the definition.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "em_update.h"
#include "engine.h"

namespace capsfast {

namespace {

// The arguments of a call, contiguous.
struct Call {
  Tensor mass, first, second, center, beta_a, beta_u;  // [B, J], three [B, J, D], two [J]
  OptionalTensor last, out_mask;                       // [B, J, D], none without momentum; [B, J]
  em::Options options;
  double inverse_temperature;
  bool final;
  int64_t B, J, D;
  ScalarType type;

  explicit Call(Stack& stack) {
    stack >> mass >> first >> second >> center >> beta_a >> beta_u >> last >> out_mask;
    options.take(stack);
    stack >> inverse_temperature >> final;
    type = mass.scalar_type();
    STD_TORCH_CHECK(
        type == ScalarType::Float || type == ScalarType::Double, "capsfast: em_update takes float32 and float64");
    STD_TORCH_CHECK(first.dim() == 3, "capsfast: first must be [B, J, D]");
    B = first.size(0), J = first.size(1), D = first.size(2);
    take("mass", mass, {B, J}, type);
    for (Tensor* moment : {&first, &second, &center}) take("first, second and center", *moment, {B, J, D}, type);
    for (Tensor* beta : {&beta_a, &beta_u}) take("beta_a and beta_u", *beta, {J}, type);
    take("last", last, {B, J, D}, type);
    take("out_mask", out_mask, {B, J}, ScalarType::Bool);
  }
  static void take(const char* name, Tensor& tensor, std::initializer_list<int64_t> sizes, ScalarType dtype) {
    Arguments<CpuEngine>::expect(name, tensor, sizes);
    STD_TORCH_CHECK(tensor.scalar_type() == dtype, "capsfast: ", name, " has a dtype that does not fit");
    if (!tensor.is_contiguous()) tensor = torch::stable::contiguous(tensor);
  }
  static void take(const char* name, OptionalTensor& tensor, std::initializer_list<int64_t> sizes, ScalarType dtype) {
    if (tensor.has_value()) take(name, *tensor, sizes, dtype);
  }

  template <class T>
  em::Step<T> step() const;
};

template <class T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}
template <class T>
const T* data(const OptionalTensor& tensor) {
  return tensor.has_value() ? data<T>(*tensor) : nullptr;
}

template <class T>
em::Step<T> Call::step() const {
  return {options,
          inverse_temperature,
          final,
          last.has_value(),
          B,
          J,
          D,
          data<T>(mass),
          data<T>(first),
          data<T>(second),
          data<T>(center),
          data<T>(last),
          data<T>(beta_a),
          data<T>(beta_u),
          {data<uint8_t>(out_mask), {J, 1}}};
}

// A new tensor of the shape of `like`, [0] if it is not wanted.
Tensor new_like(const Tensor& like, bool wanted = true) {
  return wanted ? empty(like, like.sizes().data(), like.sizes().size(), like.scalar_type())
                : empty(like, {0}, like.scalar_type());
}

void em_update(Stack& stack) {
  const Call call(stack);
  const Tensor poses = new_like(call.first), precision = new_like(call.first, !call.final), score = new_like(call.mass);
  with_type(call.type, [&](auto zero) {
    using T = decltype(zero);
    em::update<T>(call.step<T>(), data<T>(poses), data<T>(precision), data<T>(score));
  });
  stack.give({poses, precision, score});
}

void em_update_backward(Stack& stack) {
  OptionalTensor dposes, dprecision, dscore;
  stack >> dposes >> dprecision >> dscore;
  const Call call(stack);
  const std::vector<bool> needed = stack.needed(7);
  Call::take("dposes", dposes, {call.B, call.J, call.D}, call.type);
  Call::take("dprecision", dprecision, {call.B, call.J, call.D}, call.type);
  Call::take("dscore", dscore, {call.B, call.J}, call.type);
  const bool of_last = call.last.has_value();
  const Tensor dmass = new_like(call.mass), dfirst = new_like(call.first), dsecond = new_like(call.first),
               dcenter = new_like(call.first), dlast = new_like(call.first, of_last), of_beta_a = new_like(call.mass),
               of_beta_u = new_like(call.mass), dbeta_a = new_like(call.beta_a), dbeta_u = new_like(call.beta_u);
  with_type(call.type, [&](auto zero) {
    using T = decltype(zero);
    const em::Gradients<T> gradients{
        data<T>(dposes),    data<T>(dprecision), data<T>(dscore),  data<T>(dmass),
        data<T>(dfirst),    data<T>(dsecond),    data<T>(dcenter), of_last ? data<T>(dlast) : nullptr,
        data<T>(of_beta_a), data<T>(of_beta_u)};
    em::for_samples<T>(call.step<T>(), gradients);
    for (const Tensor& total : {dbeta_a, dbeta_u}) std::fill_n(data<T>(total), call.J, T(0));
    em::add_shares<T>(gradients.of_beta_a, call.B, call.J, data<T>(dbeta_a));
    em::add_shares<T>(gradients.of_beta_u, call.B, call.J, data<T>(dbeta_u));
  });
  const auto kept = [&](const Tensor& gradient, size_t n) { return needed[n] ? gradient : new_like(gradient, false); };
  stack.give({kept(dmass, 0), kept(dfirst, 1), kept(dsecond, 2), kept(dcenter, 3), kept(dbeta_a, 4), kept(dbeta_u, 5),
              kept(dlast, 6)});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(capsfast, CPU, m) {
  m.impl("em_update", &boxed<em_update>);
  m.impl("em_update_backward", &boxed<em_update_backward>);
}

}  // namespace capsfast
