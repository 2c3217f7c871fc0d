// Runs a model that capsfast.export.to_package() compiled, in a process without Python.
//
//   serve LIBRARY PACKAGE INPUT OUTPUT SIZE...
//
// LIBRARY: the file that capsfast.export.library() names. PACKAGE: of a CPU model that takes one float32 tensor.
// INPUT: a file with the numbers of the tensor; SIZE... are its axes. OUTPUT: a file for the numbers of all results,
// one after the other, as float32. Prints the sizes of each result on a line.

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

at::Tensor read_tensor(const char* name, const std::vector<int64_t>& sizes) {
  at::Tensor numbers = at::empty(sizes, at::kFloat);
  std::ifstream file(name, std::ios::binary);
  file.read(static_cast<char*>(numbers.data_ptr()), numbers.nbytes());
  if (!file || file.peek() != std::ifstream::traits_type::eof()) {
    throw std::runtime_error(std::string(name) + " cannot be read, or does not hold as many numbers as the sizes say");
  }
  return numbers;
}

void write_tensor(std::ofstream& file, const at::Tensor& given) {
  const at::Tensor numbers = given.to(at::kFloat).contiguous();
  file.write(static_cast<const char*>(numbers.data_ptr()), numbers.nbytes());
  for (const int64_t size : numbers.sizes()) std::cout << size << ' ';
  std::cout << '\n';
}

void serve(char** words, const std::vector<int64_t>& sizes) {
  // Loads the library first, because the package looks the ops up by name.
  if (!dlopen(words[1], RTLD_NOW | RTLD_GLOBAL)) throw std::runtime_error(dlerror());
  const c10::InferenceMode guard;
  torch::inductor::AOTIModelPackageLoader model(words[2]);
  const std::vector<at::Tensor> results = model.run({read_tensor(words[3], sizes)});
  std::ofstream file(words[4], std::ios::binary);
  for (const at::Tensor& result : results) write_tensor(file, result);
  file.close();
  if (!file) throw std::runtime_error(std::string(words[4]) + " cannot be written");
}

}  // namespace

int main(int count, char** words) {
  if (count < 6) {
    std::cerr << "serve LIBRARY PACKAGE INPUT OUTPUT SIZE...\n";
    return 2;
  }
  try {
    std::vector<int64_t> sizes;
    for (int n = 5; n < count; ++n) sizes.push_back(std::stoll(words[n]));
    serve(words, sizes);
  } catch (const std::exception& error) {
    std::cerr << "serve: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
