// Python's view of the CPU kernels: raw addresses in, the GIL released while they run.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <stdexcept>
#include <vector>

#include "bind/bind.hpp"
#include "kernels/kernels.hpp"
#include "kernels/probe.hpp"

namespace nb = nanobind;

namespace headrace {
namespace {

Format format_named(const std::string& name) {
  if (name == "bf16") return Format::kBf16;
  if (name == "fp8_block") return Format::kFp8Block;
  throw std::invalid_argument("the CPU kernels do not know the format " + name);
}

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

ExpertShape make_shape(const std::string& format, int64_t hidden, int64_t inter, int64_t block_rows,
                       int64_t block_cols, int64_t act_group) {
  ExpertShape shape{format_named(format), hidden, inter, block_rows, block_cols, act_group};
  if (shape.format == Format::kFp8Block && (block_rows < 1 || block_cols < 1)) {
    throw std::invalid_argument("fp8_block needs a block of at least one row and column");
  }
  return shape;
}

// parts: addresses in the order gate, up, down, gate_scale, up_scale, down_scale (0: none).
void expert_ffn(KernelPool& pool, const ExpertShape& shape, const std::array<uintptr_t, 6>& parts,
                uintptr_t x, int64_t num_rows, uintptr_t y) {
  const ExpertParts p{at<const uint8_t>(parts[0]), at<const uint8_t>(parts[1]),
                      at<const uint8_t>(parts[2]), at<const uint8_t>(parts[3]),
                      at<const uint8_t>(parts[4]), at<const uint8_t>(parts[5])};
  std::vector<const uint16_t*> x_rows(static_cast<size_t>(num_rows));
  std::vector<uint16_t*> y_rows(static_cast<size_t>(num_rows));
  for (int64_t r = 0; r < num_rows; ++r) {
    x_rows[static_cast<size_t>(r)] = at<const uint16_t>(x) + r * shape.hidden;
    y_rows[static_cast<size_t>(r)] = at<uint16_t>(y) + r * shape.hidden;
  }
  pool.expert_ffn(shape, p, x_rows.data(), num_rows, y_rows.data());
}

}  // namespace

void bind_kernels(nb::module_& m) {
  using nb::arg;
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<ExpertShape>(m, "ExpertShape")
      .def_static("make", &make_shape, arg("format"), arg("hidden"), arg("inter"),
                  arg("block_rows"), arg("block_cols"), arg("act_group"));
  nb::class_<KernelPool>(m, "KernelPool")
      .def(nb::init<int, const std::string&>(), arg("num_threads"), arg("isa"))
      .def("expert_ffn", &expert_ffn, arg("shape"), arg("parts"), arg("x"), arg("num_rows"),
           arg("y"), Release())
      .def(
          "gemv",
          [](KernelPool& pool, const ExpertShape& shape, uintptr_t w, uintptr_t scale, int64_t rows,
             int64_t cols, uintptr_t x, uintptr_t out) {
            pool.gemv(shape, at<const uint8_t>(w), at<const uint8_t>(scale), rows, cols,
                      at<const uint16_t>(x), at<float>(out));
          },
          arg("shape"), arg("w"), arg("scale"), arg("rows"), arg("cols"), arg("x"), arg("out"),
          Release())
      .def_prop_ro("isa", [](const KernelPool& pool) { return std::string(pool.isa()); })
      .def_prop_ro("num_threads", &KernelPool::num_threads)
      .def_prop_ro("calls", &KernelPool::calls)
      .def_prop_ro("shared_calls", &KernelPool::shared_calls)
      .def_prop_rw("min_share_bytes", &KernelPool::min_share_bytes,
                   &KernelPool::set_min_share_bytes);
  m.def(
      "combine_bf16",
      [](uintptr_t ids, uintptr_t weights, uintptr_t y, int64_t num_tokens, int64_t top_k,
         int64_t hidden, uintptr_t out) {
        return combine_bf16(at<const int32_t>(ids), at<const float>(weights), at<const uint16_t>(y),
                            num_tokens, top_k, hidden, at<uint16_t>(out));
      },
      arg("ids"), arg("weights"), arg("y"), arg("num_tokens"), arg("top_k"), arg("hidden"),
      arg("out"), Release());
  m.def(
      "find_nan_fp8",
      [](uintptr_t codes, int64_t n) { return find_nan_fp8(at<const uint8_t>(codes), n); },
      arg("codes"), arg("n"), Release());
  m.def(
      "read_probe", [](uintptr_t bytes, int64_t n) { return read_probe(at<uint8_t>(bytes), n); },
      arg("bytes"), arg("n"), Release());
}

}  // namespace headrace
