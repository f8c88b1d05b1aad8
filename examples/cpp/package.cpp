// Runs the model that package.py has written, and compares its results with those of Python.
//
//   package folder
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : ".";
  std::ifstream file(folder + "/example.pt", std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const c10::IValue loaded = torch::jit::pickle_load(bytes);
  const c10::ArrayRef<c10::IValue> example = loaded.toListRef();

  // The package holds calls of selfattn's operators, which are those of the library that is linked.
  torch::inductor::AOTIModelPackageLoader model(folder + "/model.pt2");
  double largest = 0;
  for (size_t i = 0; i < example.size() / 2; ++i) {
    const at::Tensor expected = example[example.size() / 2 + i].toTensor();
    const at::Tensor result = model.run({example[i].toTensor()}).at(0);
    TORCH_CHECK(result.sizes() == expected.sizes() && result.isfinite().all().item<bool>());
    largest = std::max(largest, (result - expected).abs().max().item<double>());
  }
  std::cout << "within " << largest << " of the model in Python\n";
  return largest < 1e-5 ? 0 : 1;
}
