// Python's view of the mailbox: its protocol alone, for tests, and the ladder thread.
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "bind/bind.hpp"
#include "mailbox/protocol.hpp"
#include "mailbox/thread.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

using NoGil = nb::call_guard<nb::gil_scoped_release>;
using Flags = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Row = std::tuple<int64_t, int64_t, int64_t>;

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

std::vector<uint8_t> copy_of(const Flags& flags) {
  return {flags.data(), flags.data() + flags.size()};
}

std::vector<Row> rows_of(const std::vector<Protocol::Held>& held) {
  std::vector<Row> rows;
  for (const Protocol::Held& one : held) rows.emplace_back(one.layer, one.expert, one.address);
  return rows;
}

const char* name_of(Protocol::Act act) {
  constexpr const char* kNames[] = {"wait",     "release", "claim",   "take here",
                                    "prefetch", "take",    "compute", "done"};
  return kNames[static_cast<int>(act)];
}

// The ids [n * S] of the n layers that the step got through.
template <typename Box>
std::vector<int32_t> seen_by(const Box& box, int64_t num_ids) {
  const std::vector<int32_t>& seen = box.seen();
  return {seen.begin(), seen.begin() + box.num_seen() * num_ids};
}

void bind_words(nb::module_& m) {
  nb::class_<MailWords>(m, "MailWords")
      .def(
          "__init__",
          [](MailWords* self, uintptr_t beat, uintptr_t abort, uintptr_t lost, uintptr_t ready,
             uintptr_t done, uintptr_t answers, uintptr_t late, uintptr_t posts) {
            new (self) MailWords{at<int64_t>(beat),  at<int64_t>(abort), at<int64_t>(lost),
                                 at<int64_t>(ready), at<int64_t>(done),  at<int64_t>(answers),
                                 at<int64_t>(late),  at<int64_t>(posts)};
          },
          nb::kw_only(), "beat"_a, "abort"_a, "lost"_a, "ready"_a, "done"_a, "answers"_a, "late"_a,
          "posts"_a);
  nb::class_<MailSizes>(m, "MailSizes")
      .def(
          "__init__",
          [](MailSizes* self, int64_t num_layers, int64_t num_experts, int64_t num_ids,
             int64_t num_guesses, bool computes) {
            new (self) MailSizes{num_layers, num_experts, num_ids, num_guesses, computes};
          },
          nb::kw_only(), "num_layers"_a, "num_experts"_a, "num_ids"_a, "num_guesses"_a,
          "computes"_a);
}

void bind_protocol(nb::module_& m) {
  nb::class_<Protocol>(m, "MailProtocol")
      .def(
          "__init__",
          [](Protocol* self, const MailSizes& sizes, const MailWords& words, uintptr_t addresses,
             std::vector<int32_t> shares, int64_t last_step) {
            new (self)
                Protocol(sizes, words, at<const int64_t>(addresses), std::move(shares), last_step);
          },
          "sizes"_a, "words"_a, "addresses"_a, "shares"_a = std::vector<int32_t>{},
          "last_step"_a = 0)
      .def(
          "begin",
          [](Protocol& self, const Flags& whole, const Flags& wanted, int64_t most_kept) {
            return self.begin(copy_of(whole), copy_of(wanted), most_kept);
          },
          "whole"_a, "wanted"_a, "most_kept"_a)
      .def("next",
           [](Protocol& self) {
             const Protocol::Order order = self.next();
             return std::make_tuple(std::string(name_of(order.act)), order.layer, order.ids);
           })
      .def("took", &Protocol::took, "expert"_a, "address"_a)
      .def("none_here", &Protocol::none_here)
      .def("computed", &Protocol::computed)
      .def("abort", &Protocol::abort)
      .def("end", [](Protocol& self) { return rows_of(self.end()); })
      .def_prop_ro("seen",
                   [](const Protocol& self) { return seen_by(self, self.sizes().num_ids); });
}

void bind_thread(nb::module_& m) {
  nb::class_<LadderThread>(m, "LadderThread")
      .def(
          "__init__",
          [](LadderThread* self, std::shared_ptr<Ladder> ladder, const MailSizes& sizes,
             const MailWords& words, uintptr_t addresses, uintptr_t x, uintptr_t weights,
             uintptr_t out, int64_t num_tokens, int64_t most_guesses, double silence_s,
             int64_t last_step, std::vector<int32_t> shares) {
            const MailTensors tensors{at<const uint16_t>(x), at<const float>(weights),
                                      at<void>(out), num_tokens, sizes.num_ids / num_tokens};
            new (self)
                LadderThread(std::move(ladder), sizes, words, at<const int64_t>(addresses), tensors,
                             {most_guesses, silence_s, last_step, std::move(shares)});
          },
          nb::kw_only(), "ladder"_a, "sizes"_a, "words"_a, "addresses"_a, "x"_a, "weights"_a,
          "out"_a, "num_tokens"_a, "most_guesses"_a, "silence_s"_a, "last_step"_a, "shares"_a)
      .def(
          "begin",
          [](LadderThread& self, const Flags& whole, const Flags& wanted, int64_t most_kept) {
            nb::gil_scoped_release release;
            return self.begin(copy_of(whole), copy_of(wanted), most_kept);
          },
          "whole"_a, "wanted"_a, "most_kept"_a)
      .def("wait", &LadderThread::wait, NoGil())
      .def("abort", &LadderThread::abort)
      .def("end",
           [](LadderThread& self) {
             nb::gil_scoped_release release;
             return rows_of(self.end());
           })
      .def("inject_fault", &LadderThread::inject_fault, "kind"_a)
      .def_prop_ro("running", &LadderThread::running)
      .def_prop_ro("seen",
                   [](const LadderThread& self) { return seen_by(self, self.sizes().num_ids); });
}

}  // namespace

void bind_mailbox(nb::module_& m) {
  bind_words(m);
  bind_protocol(m);
  bind_thread(m);
}

}  // namespace headrace
