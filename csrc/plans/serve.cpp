// The kernel of an op whose calls are planned in Python and run here. A call reads its signature, finds the plan of the
// signature and runs it. The only question to Python is whether a profiler has hooks. A call without a plan goes to the
// op's function in Python, which plans and runs the call, and may keep the plan for the next calls of the signature.
#include "serve.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <array>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plan.h"

namespace capsfast::plans {

namespace py = pybind11;

namespace {

constexpr uintptr_t kAlignment = 16;  // as ALIGNMENT of plan.py
constexpr size_t kMostOps = 64;
constexpr size_t kMostPlans = 256;  // as MOST of plan.py

enum class Kind { tensor, optional_tensor, number, optional_number, boolean, real, word, booleans, reals };
constexpr const char* kTypes[] = {"Tensor", "Tensor?", "int", "SymInt?", "bool", "float", "str", "bool[]", "float[]"};

Kind kind_of(const std::string& type) {
  for (size_t n = 0; n < std::size(kTypes); ++n) {
    if (type == kTypes[n]) return static_cast<Kind>(n);
  }
  throw std::invalid_argument("capsfast: no plan takes arguments of type " + type);
}

struct Op {
  std::vector<Kind> kinds;
  size_t results = 0;
  py::object planned;  // the function in Python
};

// Plans by signature. Kernels that Triton compiled live as long as a plan that launches them.
struct Kept {
  Plan plan;
  py::object kernels;
};
struct Table {
  std::shared_mutex lock;
  std::unordered_map<std::string, std::shared_ptr<const Kept>> plans;
  std::deque<std::string> order;  // the oldest first
};

// Never destroyed: a thread may still run a plan, and Python may be gone.
std::vector<Op>& ops() {
  static auto* const all = new std::vector<Op>(kMostOps);
  return *all;
}
size_t served = 0;
Table& table() {
  static auto* const all = new Table;
  return *all;
}
// The function in Python that tells whether launches must go through Triton, because a profiler has hooks.
py::object& hooked() {
  static auto* const function = new py::object;
  return *function;
}

// Functions of torch for its own compiled programs. The first makes tensors from a list of handles, which it takes
// over; the second makes a handle from a tensor.
py::object& tensors_from_handles() {
  static auto* const function = new py::object;
  return *function;
}
py::object& handle_from_tensor() {
  static auto* const function = new py::object;
  return *function;
}

// The signature of the call that Python plans in this thread.
thread_local const std::string* planning = nullptr;
struct Planning {
  explicit Planning(const std::string& signature) { planning = &signature; }
  ~Planning() { planning = outer; }
  const std::string* const outer = planning;
};

void free_kept(const Kept* kept) {
  const py::gil_scoped_acquire gil;
  delete kept;
}

AtenTensorHandle handle_of(StableIValue value) { return torch::stable::detail::to<AtenTensorHandle>(value); }

// What an argument that may be None points to.
const StableIValue* pointed(StableIValue value) { return torch::stable::detail::to<const StableIValue*>(value); }

// Reads the arguments of a call without taking them off the stack.
class Reader {
 public:
  std::string signature;
  std::vector<char*> addresses;
  Device device{};

  explicit Reader(size_t op) {
    signature.reserve(1024);
    addresses.reserve(32);
    add(op);
  }

  void read(Kind kind, StableIValue value) {
    switch (kind) {
      case Kind::tensor:
        return add_tensor(handle_of(value));
      case Kind::optional_tensor:
        if (value == 0) return add(0);
        return add_tensor(handle_of(*pointed(value)));
      case Kind::optional_number:
        add(value != 0);
        return add(value == 0 ? 0 : *pointed(value));
      case Kind::word: {
        const auto handle = torch::stable::detail::to<StringHandle>(value);
        size_t length = 0;
        const char* data = nullptr;
        TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
        TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
        add(length);
        signature.append(data, length);
        return;
      }
      case Kind::booleans:
      case Kind::reals: {
        const auto list = torch::stable::detail::to<StableListHandle>(value);
        size_t count = 0;
        TORCH_ERROR_CODE_CHECK(torch_list_size(list, &count));
        add(count);
        for (size_t n = 0; n < count; ++n) {
          StableIValue item = 0;
          TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, n, &item));
          add(item);
        }
        return;
      }
      default:
        return add(value);
    }
  }

 private:
  void add(uint64_t value) { signature.append(reinterpret_cast<const char*>(&value), sizeof(value)); }

  void add_tensor(AtenTensorHandle tensor) {
    int64_t axes = 0, *sizes = nullptr, *strides = nullptr;
    int32_t dtype = 0;
    Device on{};
    void* address = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &axes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &on.type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor, &on.index));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &address));
    if (addresses.empty()) device = on;
    addresses.push_back(static_cast<char*>(address));
    add(1 + static_cast<uint64_t>(axes));
    for (int64_t axis = 0; axis < axes; ++axis) add(sizes[axis]), add(strides[axis]);
    add(dtype), add(on.type), add(on.index), add(reinterpret_cast<uintptr_t>(address) % kAlignment);
  }
};

// The arguments of a call, which a kernel has to free, whatever happens.
class Arguments {
 public:
  Arguments(const std::vector<Kind>& kinds, StableIValue* stack) : kinds_(kinds), stack_(stack) {}
  Arguments(const Arguments&) = delete;
  ~Arguments() {
    while (next_ < kinds_.size()) {
      const Kind kind = kinds_[next_];
      drop(kind, stack_[next_++]);
    }
  }

  // The arguments for the function in Python. Call this function once.
  py::tuple as_python();

 private:
  static void drop(Kind kind, StableIValue value) {
    using torch::stable::detail::to;
    switch (kind) {
      case Kind::tensor:
        return static_cast<void>(to<Tensor>(value));
      case Kind::optional_tensor:
        return static_cast<void>(to<std::optional<Tensor>>(value));
      case Kind::optional_number:
        return static_cast<void>(to<std::optional<int64_t>>(value));
      case Kind::word:
        return static_cast<void>(to<std::string>(value));
      case Kind::booleans:
        return static_cast<void>(to<std::vector<bool>>(value));
      case Kind::reals:
        return static_cast<void>(to<std::vector<double>>(value));
      default:
        return;
    }
  }

  const std::vector<Kind>& kinds_;
  StableIValue* const stack_;
  size_t next_ = 0;
};

// An argument that is no tensor.
py::object plain(Kind kind, StableIValue value) {
  using torch::stable::detail::to;
  switch (kind) {
    case Kind::number:
      return py::int_(to<int64_t>(value));
    case Kind::optional_number:
      return py::cast(to<std::optional<int64_t>>(value));
    case Kind::boolean:
      return py::bool_(to<bool>(value));
    case Kind::real:
      return py::float_(to<double>(value));
    case Kind::word:
      return py::str(to<std::string>(value));
    case Kind::booleans:
      return py::cast(to<std::vector<bool>>(value));
    default:
      return py::cast(to<std::vector<double>>(value));
  }
}

py::tuple Arguments::as_python() {
  using torch::stable::detail::to;
  py::tuple arguments(kinds_.size());
  std::vector<std::pair<size_t, Tensor>> tensors;
  while (next_ < kinds_.size()) {
    const size_t n = next_++;
    std::optional<Tensor> tensor;
    if (kinds_[n] == Kind::tensor) {
      tensor = to<Tensor>(stack_[n]);
    } else if (kinds_[n] == Kind::optional_tensor) {
      tensor = to<std::optional<Tensor>>(stack_[n]);
    } else {
      arguments[n] = plain(kinds_[n], stack_[n]);
      continue;
    }
    arguments[n] = py::none();
    if (tensor.has_value()) tensors.emplace_back(n, std::move(*tensor));
  }
  py::list handles;
  for (const auto& [n, tensor] : tensors) {
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor.get(), &handle));
    handles.append(py::capsule(static_cast<void*>(handle)));
  }
  const py::list given = tensors_from_handles()(handles);
  for (size_t at = 0; at < tensors.size(); ++at) arguments[tensors[at].first] = given[at];
  return arguments;
}

// A Python error goes through torch to the caller as it is.
std::vector<Tensor> run_in_python(const Op& op, const std::string& signature, Arguments& arguments) {
  const py::gil_scoped_acquire gil;
  const Planning planned(signature);
  std::vector<Tensor> results;
  for (const py::handle result : py::object(op.planned(*arguments.as_python()))) {
    const py::capsule handle = handle_from_tensor()(result);
    results.emplace_back(static_cast<AtenTensorHandle>(handle.get_pointer()));
  }
  return results;
}

std::shared_ptr<const Kept> plan_for(const std::string& signature) {
  Table& all = table();
  const std::shared_lock held(all.lock);
  const auto found = all.plans.find(signature);
  return found == all.plans.end() ? nullptr : found->second;
}

bool launches_are_hooked() {
  const py::gil_scoped_acquire gil;
  return hooked()().cast<bool>();
}

void call(size_t number, StableIValue* stack, uint64_t arguments, uint64_t results) {
  const Op& op = ops()[number];
  STD_TORCH_CHECK(arguments == op.kinds.size() && results == op.results, "capsfast: a schema and its kernel differ");
  std::vector<Tensor> outputs;
  {
    Arguments given(op.kinds, stack);
    Reader reader(number);
    for (size_t n = 0; n < arguments; ++n) reader.read(op.kinds[n], stack[n]);
    const auto kept = plan_for(reader.signature);
    if (kept != nullptr && !launches_are_hooked()) {
      outputs = kept->plan.run(std::move(reader.addresses), reader.device);
    }
    if (outputs.empty()) outputs = run_in_python(op, reader.signature, given);
  }
  STD_TORCH_CHECK(outputs.size() == results, "capsfast: a plan returned ", outputs.size(), " of ", results, " results");
  for (size_t n = 0; n < results; ++n) stack[n] = torch::stable::detail::from(outputs[n]);
}

template <size_t n>
void kernel(StableIValue* stack, uint64_t arguments, uint64_t results) {
  call(n, stack, arguments, results);
}

using Boxed = void (*)(StableIValue*, uint64_t, uint64_t);

template <size_t... n>
constexpr std::array<Boxed, sizeof...(n)> kernels(std::index_sequence<n...>) {
  return {kernel<n>...};
}

void serve(const std::string& name, const std::vector<std::string>& types, size_t results, py::object planned) {
  using torch::stable::detail::StableLibrary;
  static constexpr auto all = kernels(std::make_index_sequence<kMostOps>());
  if (served == kMostOps) throw std::runtime_error("capsfast: too many ops have plans");
  const py::object handles = py::module_::import("torch").attr("_C").attr("_aoti");
  // The function for one tensor has "stealing" in its name, but does not take the handle.
  tensors_from_handles() = handles.attr("alloc_tensors_by_stealing_from_void_ptrs");
  handle_from_tensor() = handles.attr("unsafe_alloc_void_ptr_from_tensor");
  Op& op = ops()[served];
  for (const std::string& type : types) op.kinds.push_back(kind_of(type));
  op.results = results;
  op.planned = std::move(planned);
  for (const char* key : {"CPU", "CUDA"}) {
    // Never destroyed: that would take the kernel away again.
    auto* const library = new StableLibrary(StableLibrary::Kind::IMPL, "capsfast", key, __FILE__, __LINE__);
    library->impl(name.c_str(), all[served]);
  }
  ++served;
}

int32_t dtype_of(const std::string& name) {
  if (name == "torch.float32") return aoti_torch_dtype_float32();
  if (name == "torch.bfloat16") return aoti_torch_dtype_bfloat16();
  if (name == "torch.float16") return aoti_torch_dtype_float16();
  if (name == "torch.uint8") return aoti_torch_dtype_uint8();
  throw std::invalid_argument("capsfast: no plan makes tensors of " + name);
}

// Keeps a plan for the signature that this thread plans. False if no op asked for a plan, or if the plan cannot be run
// here.
bool keep(bool on_gpu, const std::vector<std::tuple<std::string, std::vector<int64_t>, std::vector<int64_t>>>& made,
          const std::vector<py::dict>& steps, const std::vector<size_t>& outputs, py::object kernels) {
  if (planning == nullptr || !has_driver(on_gpu)) return false;
  auto* const kept = new Kept{{{}, {}, outputs}, std::move(kernels)};
  const std::shared_ptr<const Kept> shared(kept, free_kept);
  for (const auto& [dtype, sizes, strides] : made) kept->plan.made.push_back({dtype_of(dtype), sizes, strides});
  for (const py::dict& each : steps) {
    Step step;
    for (const auto& [argument, tensor, offset] :
         each["addresses"].cast<std::vector<std::tuple<size_t, size_t, int64_t>>>()) {
      step.addresses.push_back({argument, tensor, offset});
    }
    if (each.contains("zero_bytes")) {
      step.zero_bytes = each["zero_bytes"].cast<size_t>();
      kept->plan.steps.push_back(std::move(step));
      continue;
    }
    step.kernel.function = reinterpret_cast<void*>(each["function"].cast<uintptr_t>());
    const auto grid = each["grid"].cast<std::array<unsigned, 3>>();
    std::copy(grid.begin(), grid.end(), step.kernel.grid);
    step.kernel.threads = each["threads"].cast<unsigned>();
    step.kernel.shared_bytes = each["shared_bytes"].cast<unsigned>();
    step.kernel.cooperative = each["cooperative"].cast<bool>();
    step.kernel.early = each["early"].cast<bool>();
    step.arguments = each["arguments"].cast<std::vector<uint64_t>>();
    kept->plan.steps.push_back(std::move(step));
  }
  Table& all = table();
  std::shared_ptr<const Kept> oldest;  // freed after the lock
  const std::unique_lock held(all.lock);
  if (all.plans.count(*planning) == 0) all.order.push_back(*planning);
  std::swap(oldest, all.plans[*planning]);
  all.plans[*planning] = shared;
  if (all.order.size() > kMostPlans) {
    oldest = std::move(all.plans[all.order.front()]);
    all.plans.erase(all.order.front());
    all.order.pop_front();
  }
  return true;
}

void forget() {
  std::unordered_map<std::string, std::shared_ptr<const Kept>> dropped;
  Table& all = table();
  const std::unique_lock held(all.lock);
  dropped.swap(all.plans);
  all.order.clear();
}

}  // namespace

void define(py::module_& m) {
  m.def("serve", &serve, "Gives an op the kernel that runs its plans; `planned` is its function in Python.");
  m.def("keep_plan", &keep, "Keeps a plan for the signature that this thread plans; whether it will be run here.");
  m.def("forget_plans", &forget, "Drops all plans.");
  m.def(
      "ask_before_launches", [](py::object function) { hooked() = std::move(function); },
      "A function that says whether launches must take Triton's way, for hooks of profilers.");
  m.def("use_driver", &use_driver, "Launches by this library instead of the CUDA driver, for tests.");
}

}  // namespace capsfast::plans
