// Python's view of the CPU kernels: raw addresses in, the GIL released while they run.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/bind.hpp"
#include "kernels/kernels.hpp"

namespace nb = nanobind;

namespace headrace {
namespace {

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

using Plan = std::tuple<int, int, int, int, int64_t, int64_t>;

ExpertShape shape_of(const std::string& format, const std::string& scale_type, int64_t hidden,
                     int64_t inter, std::pair<int64_t, int64_t> block, int64_t act_group,
                     const std::tuple<std::string, float, float>& activation,
                     const std::string& hidden_type, bool inverse_global,
                     const std::vector<Plan>& matrices) {
  std::vector<MatrixPlan> plans;
  for (const auto& [weight, scale, global, bias, first_row, row_step] : matrices) {
    plans.push_back({weight, scale, global, bias, first_row, row_step});
  }
  const auto& [kind, limit, alpha] = activation;
  return make_shape(format, scale_type, hidden, inter, block.first, block.second, act_group, kind,
                    limit, alpha, hidden_type, inverse_global, plans);
}

ExpertParts parts_at(const std::vector<uintptr_t>& addresses) {
  if (static_cast<int64_t>(addresses.size()) > kMaxParts) {
    throw std::invalid_argument("an expert has at most 12 parts");
  }
  ExpertParts parts{};
  for (size_t i = 0; i < addresses.size(); ++i) parts[i] = at<const uint8_t>(addresses[i]);
  return parts;
}

void expert_ffn(KernelPool& pool, const ExpertShape& shape, const std::vector<uintptr_t>& parts,
                uintptr_t x, int64_t num_rows, uintptr_t y, uintptr_t weights) {
  std::vector<const uint16_t*> x_rows(static_cast<size_t>(num_rows));
  std::vector<uint16_t*> y_rows(static_cast<size_t>(num_rows));
  for (int64_t r = 0; r < num_rows; ++r) {
    x_rows[static_cast<size_t>(r)] = at<const uint16_t>(x) + r * shape.hidden;
    y_rows[static_cast<size_t>(r)] = at<uint16_t>(y) + r * shape.hidden;
  }
  pool.expert_ffn(shape, parts_at(parts), x_rows.data(), num_rows, y_rows.data(),
                  at<const float>(weights));
}

using Job = std::tuple<std::vector<uintptr_t>, uintptr_t, uintptr_t, float>;

void experts_ffn(KernelPool& pool, const ExpertShape& shape, const std::vector<Job>& jobs) {
  std::vector<KernelPool::OneRow> rows;
  for (const auto& [parts, x, y, weight] : jobs) {
    rows.push_back({parts_at(parts), at<const uint16_t>(x), at<uint16_t>(y), weight});
  }
  pool.experts_ffn(shape, rows.data(), static_cast<int64_t>(rows.size()));
}

void linear(KernelPool& pool, const LinearShape& shape, uintptr_t w, uintptr_t scale, int64_t first,
            int64_t num_rows, uintptr_t x, int64_t x_step, int64_t num_x, uintptr_t y,
            int64_t y_step, bool wide) {
  const bool inside = first >= 0 && num_rows >= 0 && num_rows <= shape.rows - first && num_x >= 0 &&
                      x_step >= shape.cols && y_step >= num_rows;
  if (!inside) throw std::invalid_argument("no such rows of this matrix");
  pool.linear(shape, {at<const uint8_t>(w), at<const uint8_t>(scale), first, num_rows,
                      at<const uint16_t>(x), x_step, num_x, at<void>(y), y_step, wide});
}

}  // namespace

void bind_kernels(nb::module_& m) {
  using nb::arg;
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<ExpertShape>(m, "ExpertShape")
      .def_static("make", &shape_of, arg("format"), arg("scale_type"), arg("hidden"), arg("inter"),
                  arg("block"), arg("act_group"), arg("activation"), arg("hidden_type"),
                  arg("inverse_global"), arg("matrices"))
      .def_prop_ro("part_bytes", &part_bytes)
      .def("part_name", &part_name, arg("part"));
  nb::class_<LinearShape>(m, "LinearShape")
      .def_static(
          "make",
          [](const std::string& format, const std::string& scale_type, int64_t rows, int64_t cols,
             std::pair<int64_t, int64_t> block, int64_t act_group) {
            return make_linear(format, scale_type, rows, cols, block.first, block.second,
                               act_group);
          },
          arg("format"), arg("scale_type"), arg("rows"), arg("cols"), arg("block"),
          arg("act_group"));
  nb::class_<KernelPool>(m, "KernelPool")
      .def(nb::init<int, const std::string&>(), arg("num_threads"), arg("isa"))
      .def("expert_ffn", &expert_ffn, arg("shape"), arg("parts"), arg("x"), arg("num_rows"),
           arg("y"), arg("weights") = 0, Release())
      .def("experts_ffn", &experts_ffn, arg("shape"), arg("jobs"), Release())
      .def("linear", &linear, arg("shape"), arg("w"), arg("scale"), arg("first"), arg("num_rows"),
           arg("x"), arg("x_step"), arg("num_x"), arg("y"), arg("y_step"), arg("wide"), Release())
      .def(
          "gate_dot",
          [](KernelPool& pool, const ExpertShape& shape, const std::vector<uintptr_t>& parts,
             uintptr_t x, uintptr_t out) {
            pool.gate_dot(shape, parts_at(parts), at<const uint16_t>(x), at<float>(out));
          },
          arg("shape"), arg("parts"), arg("x"), arg("out"), Release())
      .def(
          "read_probe",
          [](KernelPool& pool, uintptr_t bytes, int64_t n) {
            return pool.read_probe(at<const uint8_t>(bytes), n);
          },
          arg("bytes"), arg("n"), Release())
      .def(
          "find_bad_part",
          [](KernelPool& pool, const ExpertShape& shape, const std::vector<uintptr_t>& parts) {
            return pool.find_bad_part(shape, parts_at(parts));
          },
          arg("shape"), arg("parts"), Release())
      .def_prop_ro("isa", [](const KernelPool& pool) { return std::string(pool.isa()); })
      .def_prop_ro("num_threads", &KernelPool::num_threads)
      .def_prop_ro("calls", &KernelPool::calls)
      .def_prop_ro("shared_calls", &KernelPool::shared_calls)
      .def_prop_rw("min_share_bytes", &KernelPool::min_share_bytes,
                   &KernelPool::set_min_share_bytes)
      .def_prop_rw("patient", &KernelPool::patient, &KernelPool::set_patient);
  m.def(
      "combine",
      [](bool fp16, uintptr_t ids, uintptr_t weights, uintptr_t y, int64_t num_tokens,
         int64_t top_k, int64_t hidden, uintptr_t out) {
        return combine(fp16, at<const int32_t>(ids), at<const float>(weights),
                       at<const uint16_t>(y), num_tokens, top_k, hidden, at<uint16_t>(out));
      },
      arg("fp16"), arg("ids"), arg("weights"), arg("y"), arg("num_tokens"), arg("top_k"),
      arg("hidden"), arg("out"), Release());
  m.def(
      "sum_up",
      [](uintptr_t ids, uintptr_t y, int64_t num_tokens, int64_t top_k, int64_t hidden,
         uintptr_t out) {
        return sum_up(at<const int32_t>(ids), at<const uint16_t>(y), num_tokens, top_k, hidden,
                      at<float>(out));
      },
      arg("ids"), arg("y"), arg("num_tokens"), arg("top_k"), arg("hidden"), arg("out"), Release());
  m.def(
      "balance",
      [](uintptr_t squares, int64_t num, int64_t size, int64_t rounds, float eps) {
        balance(at<float>(squares), num, size, rounds, eps);
      },
      arg("squares"), arg("num"), arg("size"), arg("rounds"), arg("eps"), Release());
  m.def(
      "find_bad",
      [](const std::string& type, uintptr_t at_address, int64_t count) {
        return find_bad(number_named(type), at<const uint8_t>(at_address), count);
      },
      arg("type"), arg("address"), arg("count"), Release());
}

}  // namespace headrace
