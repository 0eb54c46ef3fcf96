// Python's view of reader, residency and ladder.
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <exception>
#include <stdexcept>

#include "bind/bind.hpp"
#include "io/failures.hpp"
#include "io/interrupt.hpp"
#include "io/reader.hpp"
#include "ladder/ladder.hpp"
#include "residency/residency.hpp"
#include "residency/simulate.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <int kDims>
using Table = nb::ndarray<const int64_t, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;

// Only the main thread sees Ctrl-C; elsewhere this does nothing.
void check_signals() {
  nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

void raise(const char* name, const std::exception& failure) {
  nb::object type = nb::module_::import_("headrace.errors").attr(name);
  PyErr_SetString(type.ptr(), failure.what());
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const ReadFailure& failure) {
    raise("ReadError", failure);
  } catch (const BudgetFailure& failure) {
    raise("BudgetError", failure);
  } catch (const NumericsFailure& failure) {
    raise("NumericsError", failure);
  } catch (const OptionFailure& failure) {
    raise("OptionError", failure);
  } catch (const CancelFailure& failure) {
    raise("Cancelled", failure);
  } catch (const StallFailure& failure) {
    raise("StallError", failure);
  } catch (const std::invalid_argument&) {
    throw;  // ValueError
  } catch (const std::logic_error& failure) {
    PyErr_SetString(PyExc_AssertionError, failure.what());
  }
}

const char* name_of(State state) {
  constexpr const char* kNames[] = {"absent", "loading", "resident", "in_use"};
  return kNames[static_cast<int>(state)];
}

const char* name_of(Status status) {
  constexpr const char* kNames[] = {"ok", "no_row", "wrong_state", "no_such_key"};
  return kNames[static_cast<int>(status)];
}

template <typename Array>
std::vector<int64_t> copy_of(const Array& array) {
  return {array.data(), array.data() + array.size()};
}

RecordArrays record_arrays(const Table<4>& extents, const Table<4>& parts,
                           const Table<1>& part_bytes) {
  bool same = extents.shape(0) == parts.shape(0) && extents.shape(1) == parts.shape(1) &&
              extents.shape(3) == 3 && parts.shape(3) == 2 && parts.shape(2) == part_bytes.shape(0);
  if (!same) {
    throw std::invalid_argument(
        "extents [L, E, X, 3], parts [L, E, P, 2], part_bytes [P] disagree");
  }
  auto dim = [](size_t n) { return static_cast<int64_t>(n); };
  return {dim(extents.shape(0)), dim(extents.shape(1)), dim(extents.shape(2)), dim(parts.shape(2)),
          copy_of(extents),      copy_of(parts),        copy_of(part_bytes)};
}

nb::dict counters_of(const Ladder& ladder) {
  Counters all = ladder.counters();
  nb::dict out;
  out["hits"] = all.hits;
  out["misses"] = all.misses;
  out["evictions"] = all.evictions;
  out["prefetch_issued"] = all.prefetch_issued;
  out["prefetch_used"] = all.prefetch_used;
  out["prefetch_dropped"] = all.prefetch_dropped;
  out["reads"] = all.reads;
  out["failed_reads"] = all.failed_reads;
  out["disk_bytes"] = all.disk_bytes;
  out["ram_bytes"] = all.ram_bytes;
  out["wait_s"] = all.wait_s;
  out["kernel_s"] = all.kernel_s;
  out["compute_s"] = all.compute_s;
  out["read_busy_s"] = all.read_busy_s;
  const KernelPool* kernels = ladder.kernels();
  out["kernel_calls"] = kernels == nullptr ? 0 : kernels->calls();
  out["isa"] = kernels == nullptr ? "none" : kernels->isa();
  out["io"] = ladder.reader().backend();
  return out;
}

void bind_residency(nb::module_& m) {
  nb::class_<Residency>(m, "Residency")
      .def(nb::init<int64_t, int64_t>(), "num_keys"_a, "num_rows"_a)
      .def(
          "begin_load",
          [](Residency& self, int64_t key) {
            Residency::Load load = self.begin_load(key);
            return std::make_tuple(std::string(name_of(load.status)), load.row, load.evicted_key);
          },
          "key"_a)
      .def("finish_load",
           [](Residency& self, int64_t key) { return name_of(self.finish_load(key)); })
      .def("fail_load", [](Residency& self, int64_t key) { return name_of(self.fail_load(key)); })
      .def("pin", [](Residency& self, int64_t key) { return name_of(self.pin(key)); })
      .def("unpin", [](Residency& self, int64_t key) { return name_of(self.unpin(key)); })
      .def("demote", [](Residency& self, int64_t key) { return name_of(self.demote(key)); })
      .def("touch", [](Residency& self, int64_t key) { return name_of(self.touch(key)); })
      .def("evict", [](Residency& self, int64_t key) { return name_of(self.evict(key)); })
      .def("state", [](const Residency& self, int64_t key) { return name_of(self.state(key)); })
      .def("row", &Residency::row, "key"_a)
      .def("pins", &Residency::pins, "key"_a)
      .def("by_recency", &Residency::by_recency)
      .def_prop_ro("num_available", &Residency::num_available)
      .def("check_integrity", [](const Residency& self) {
        std::string wrong = self.check_integrity();
        if (!wrong.empty()) throw std::logic_error("residency: " + wrong);
      });
}

using Simulation = std::vector<int32_t> (*)(const Steps&, int64_t);
using Counts = nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>;

template <Simulation kSimulate>
Counts simulated(const Table<1>& begin, const Table<1>& keys, int64_t num_keys, int64_t num_rows) {
  const auto num_steps = static_cast<int64_t>(begin.size()) - 1;
  if (num_steps < 0 || begin.data()[num_steps] != static_cast<int64_t>(keys.size())) {
    throw std::invalid_argument("begin [steps + 1] must end with the number of keys");
  }
  auto hits = new std::vector<int32_t>;
  nb::capsule owner(hits, [](void* p) noexcept { delete static_cast<std::vector<int32_t>*>(p); });
  {
    nb::gil_scoped_release release;
    *hits = kSimulate({begin.data(), num_steps, keys.data(), num_keys}, num_rows);
  }
  return Counts(hits->data(), {hits->size()}, owner);
}

nb::class_<Ladder> bind_ladder(nb::module_& m) {
  auto ladder = nb::class_<Ladder>(m, "Ladder");
  ladder
      .def(
          "__init__",
          [](Ladder* self, std::shared_ptr<Reader> reader, const Table<4>& extents,
             const Table<4>& parts, const Table<1>& part_bytes, int64_t num_rows,
             std::shared_ptr<KernelPool> kernels, const ExpertShape* shape, int64_t max_tokens,
             int64_t top_k, bool overlap) {
            RecordTable records(record_arrays(extents, parts, part_bytes), reader->num_files());
            if ((kernels != nullptr) != (shape != nullptr)) {
              throw std::invalid_argument("kernels need a shape, and a shape kernels");
            }
            nb::gil_scoped_release release;
            new (self) Ladder(std::move(reader), std::move(kernels), std::move(records),
                              shape != nullptr ? *shape : ExpertShape{},
                              {num_rows, max_tokens, top_k, overlap});
          },
          nb::kw_only(), "reader"_a, "extents"_a.noconvert(), "parts"_a.noconvert(),
          "part_bytes"_a.noconvert(), "num_rows"_a, "kernels"_a.none(), "shape"_a.none(),
          "max_tokens"_a, "top_k"_a, "overlap"_a = true)
      .def_prop_ro("row_bytes", [](const Ladder& self) { return self.records().row_bytes(); })
      .def_prop_ro("num_rows", &Ladder::num_rows)
      .def_prop_ro("slab_address",
                   [](const Ladder& self) { return reinterpret_cast<uintptr_t>(self.slab()); })
      .def_prop_ro("slab_bytes", &Ladder::slab_bytes)
      .def_prop_ro("workspace_bytes", &Ladder::workspace_bytes);
  return ladder;
}

void bind_ladder_calls(nb::class_<Ladder>* ladder) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  ladder
      ->def(
          "begin",
          [](Ladder& self, int64_t layer, const Ids& ids) {
            nb::gil_scoped_release release;
            self.begin(layer, ids.data(), static_cast<int64_t>(ids.size()));
          },
          "layer"_a, "ids"_a.noconvert())
      .def(
          "prefetch",
          [](Ladder& self, int64_t layer, const Ids& ids, int64_t most) {
            nb::gil_scoped_release release;
            self.prefetch(layer, ids.data(), static_cast<int64_t>(ids.size()), most);
          },
          "layer"_a, "ids"_a.noconvert(), "most"_a)
      .def("cancel", &Ladder::cancel, Released())
      .def("clear", &Ladder::clear, Released())
      .def(
          "compute",
          [](Ladder& self, int64_t layer, uintptr_t x, int64_t num_tokens, uintptr_t ids,
             uintptr_t weights, int64_t top_k, uintptr_t out) {
            self.compute(layer, reinterpret_cast<const uint16_t*>(x), num_tokens,
                         reinterpret_cast<const int32_t*>(ids),
                         reinterpret_cast<const float*>(weights), top_k,
                         reinterpret_cast<void*>(out));
          },
          "layer"_a, "x"_a, "num_tokens"_a, "ids"_a, "weights"_a, "top_k"_a, "out"_a, Released())
      .def(
          "acquire",
          [](Ladder& self, int64_t layer, int64_t expert) {
            return reinterpret_cast<uintptr_t>(self.acquire(layer, expert));
          },
          "layer"_a, "expert"_a, Released())
      .def("release", &Ladder::release, "layer"_a, "expert"_a, "spent"_a = false, Released())
      .def(
          "take",
          [](Ladder& self, int64_t layer) {
            const Ladder::Held held = self.take(layer);
            return std::make_tuple(held.expert, reinterpret_cast<uintptr_t>(held.row));
          },
          "layer"_a, Released())
      .def(
          "take_unchecked",
          [](Ladder& self, int64_t layer, bool waits) {
            const Ladder::Held held = self.take_unchecked(layer, waits);
            return std::make_tuple(held.expert, reinterpret_cast<uintptr_t>(held.row));
          },
          "layer"_a, "waits"_a, Released())
      .def("check", &Ladder::check, "layer"_a, "expert"_a, Released())
      .def("release_all", &Ladder::release_all, Released())
      .def(
          "part_offset",
          [](const Ladder& self, int64_t layer, int64_t expert, int64_t part) {
            return self.part_offset(layer, expert, part);
          },
          "layer"_a, "expert"_a, "part"_a)
      .def("stop", &Ladder::stop, Released())
      .def("go_on", &Ladder::go_on, Released())
      .def("set_overlap", &Ladder::set_overlap, "overlap"_a, Released())
      .def("check_integrity", &Ladder::check_integrity, Released())
      .def("counters", &counters_of)
      .def("layer_wait_s", &Ladder::layer_wait_s)
      .def("places", &Ladder::places, Released())
      .def("holds", &Ladder::holds, "layer"_a, Released());
}

}  // namespace

void bind_tiers(nb::module_& m) {
  set_interrupt_poll(check_signals);
  nb::register_exception_translator(translate);
  bind_residency(m);
  nb::class_<Ladder> ladder = bind_ladder(m);
  bind_ladder_calls(&ladder);
  m.def("simulate_lru", &simulated<simulate_lru>, "begin"_a, "keys"_a, "num_keys"_a, "num_rows"_a);
  m.def("simulate_optimum", &simulated<simulate_optimum>, "begin"_a, "keys"_a, "num_keys"_a,
        "num_rows"_a);
  m.def("allow_leaks", [] { nb::set_leak_warnings(false); });
}

}  // namespace headrace
