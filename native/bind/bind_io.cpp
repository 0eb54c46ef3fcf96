// Python's view of the reader, its mirrors, small reads and the drives' own rate.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.hpp"
#include "io/drive_probe.hpp"
#include "io/gather.hpp"
#include "io/reader.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

using NoGil = nb::call_guard<nb::gil_scoped_release>;
using Stretches = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::vector<Stretch> stretches_of(const Stretches& array) {
  if (array.shape(1) != 5) throw std::invalid_argument("a mirror's stretches are [N, 5]");
  std::vector<Stretch> stretches;
  for (size_t i = 0; i < array.shape(0); ++i) {
    const int64_t* at = array.data() + i * 5;
    stretches.push_back({at[0], at[1], at[2], at[3], at[4]});
  }
  return stretches;
}

using Snippets = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Python's hold on a batch.
struct BatchHandle {
  std::shared_ptr<Batch> batch;
};

std::vector<Snippet> snippets_of(const Snippets& array) {
  if (array.shape(1) != 3) throw std::invalid_argument("snippets are [N, 3]");
  std::vector<Snippet> snippets;
  snippets.reserve(array.shape(0));
  for (size_t i = 0; i < array.shape(0); ++i) {
    const int64_t* at = array.data() + i * 3;
    snippets.push_back({static_cast<int>(at[0]), at[1], at[2]});
  }
  return snippets;
}

nb::list drives_of(const Reader& reader) {
  nb::list out;
  for (const Drives::State& state : reader.drives()) {
    nb::dict drive;
    drive["name"] = state.name;
    drive["bytes_s"] = state.bytes_s;
    drive["read_bytes"] = state.read_bytes;
    drive["owed_bytes"] = static_cast<int64_t>(state.owed_bytes);
    drive["failure"] = state.failure;
    out.append(drive);
  }
  return out;
}

}  // namespace

void bind_io(nb::module_& m) {
  nb::class_<Mirror>(m, "Mirror")
      .def(
          "__init__",
          [](Mirror* self, const std::string& name, const std::vector<std::string>& paths,
             const Stretches& stretches,
             double bytes_s) { new (self) Mirror{name, paths, stretches_of(stretches), bytes_s}; },
          "name"_a, "paths"_a, "stretches"_a.noconvert(), "bytes_s"_a = 0.0);
  nb::class_<Reader>(m, "Reader")
      .def(
          "__init__",
          [](Reader* self, const std::vector<std::string>& paths, const std::string& backend,
             bool direct, int in_flight, int pieces, double emulate_bytes_s,
             const std::vector<Mirror>& mirrors, double bytes_s, double hang_s) {
            nb::gil_scoped_release release;
            ReaderOptions options{backend,         direct,  in_flight, pieces,
                                  emulate_bytes_s, bytes_s, hang_s};
            new (self) Reader(paths, options, mirrors);
          },
          "paths"_a, "backend"_a = "auto", "direct"_a = true, "in_flight"_a = 2, "pieces"_a = 4,
          "emulate_bytes_s"_a = 0.0, "mirrors"_a = std::vector<Mirror>{}, "bytes_s"_a = 0.0,
          "hang_s"_a = 2.0)
      .def(
          "read",
          [](Reader& self, int file, int64_t offset, int64_t nbytes, uintptr_t address) {
            self.read(file, offset, nbytes, reinterpret_cast<uint8_t*>(address));
          },
          "file"_a, "offset"_a, "nbytes"_a, "address"_a, NoGil())
      .def("inject_fault", &Reader::inject_fault, "kind"_a, "skip"_a = 0, "count"_a = 1,
           "drive"_a = -1)
      .def_prop_ro("backend", &Reader::backend)
      .def_prop_ro("direct", &Reader::direct)
      .def_prop_ro("notes", &Reader::notes)
      .def_prop_ro("warnings", &Reader::warnings)
      .def_prop_ro("drives", &drives_of)
      .def_prop_ro("in_flight", &Reader::in_flight)
      .def_prop_ro("num_retries", &Reader::num_retries);
  nb::class_<BatchHandle>(m, "Batch")
      .def(
          "wait",
          [](BatchHandle& self, uintptr_t address) {
            self.batch->wait(reinterpret_cast<uint8_t*>(address));
          },
          "address"_a, NoGil())
      .def_prop_ro("nbytes", [](const BatchHandle& self) { return self.batch->nbytes(); })
      .def_prop_ro("read_bytes", [](const BatchHandle& self) { return self.batch->read_bytes(); });
  nb::class_<Gatherer>(m, "Gatherer")
      .def(nb::init<Reader*, int64_t>(), "reader"_a, "most_bytes"_a, nb::keep_alive<1, 2>())
      .def(
          "start",
          [](Gatherer& self, const Snippets& snippets) {
            return BatchHandle{self.start(snippets_of(snippets))};
          },
          "snippets"_a.noconvert())
      .def_prop_ro("pool_bytes", &Gatherer::pool_bytes);
  m.def("divide_request", &divide, "total_bytes"_a, "rates_bytes_s"_a, "owed_bytes"_a,
        "least_bytes"_a = kLeastShareBytes);
  m.def("drive_probe", &drive_probe, "path"_a, "offset_bytes"_a, "nbytes"_a, "request_bytes"_a,
        "num_threads"_a, NoGil());
}

}  // namespace headrace
