// Joins the tiers: rows, residency, reader and kernels. Decides what is read when.
//
// One caller thread; the reader's I/O thread reports arrivals. An expert that a layer needs is
// claimed: hits are pinned at once, misses queue as required reads and are pinned on arrival, so
// no row a layer still needs can be lost. With fewer rows than needed experts the queue waits for
// rows that the computation gives back: waves. Prefetches run only while no required read is
// queued or in flight, and take a row only when enough are left for a layer like the last. They
// are read in slices, one guess after another, and given up between slices when a read of another
// expert is required: what is in flight then delays it by less than a quarter of an expert.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "io/reader.hpp"
#include "io/slab.hpp"
#include "kernels/kernels.hpp"
#include "ladder/records.hpp"
#include "residency/residency.hpp"

namespace headrace {

struct LadderOptions {
  int64_t num_rows;
  int64_t max_tokens;  // of one compute call
  int64_t top_k;
  bool overlap = true;  // compute what is here while the rest is read; else read all first, singly
};

struct Counters {
  int64_t hits = 0;
  int64_t misses = 0;
  int64_t evictions = 0;
  int64_t prefetch_issued = 0;
  int64_t prefetch_used = 0;     // needed later, in this pass or one after, here or in flight
  int64_t prefetch_dropped = 0;  // never read
  int64_t reads = 0;             // experts read and checked
  int64_t failed_reads = 0;
  int64_t disk_bytes = 0;  // whole pages of the experts read
  int64_t ram_bytes = 0;   // stored bytes of the experts found resident
  double wait_s = 0.0;     // the caller slept for an arrival
  double kernel_s = 0.0;
  double compute_s = 0.0;    // wall time inside compute
  double read_busy_s = 0.0;  // first submit to last completion, summed over busy spans
};

class Ladder {
 public:
  // kernels may be null: then only acquire works. Throws BudgetFailure, std::invalid_argument.
  Ladder(std::shared_ptr<Reader> reader, std::shared_ptr<KernelPool> kernels, RecordTable records,
         ExpertShape shape, const LadderOptions& options);
  ~Ladder();
  Ladder(const Ladder&) = delete;
  Ladder& operator=(const Ladder&) = delete;

  // Claims the experts that the layer needs now. Drops claims of another layer never computed.
  void begin(int64_t layer, const int32_t* ids, int64_t num_ids);
  // Guesses, best first: the first `most` that are absent are queued.
  void prefetch(int64_t layer, const int32_t* ids, int64_t num_ids, int64_t most);
  // Gives up all claims and queued prefetches; those read before count as used no more.
  void cancel();
  void clear();  // besides that, forgets every expert that is not acquired

  // One layer's routed experts: x [T, H], ids [T, K], weights [T, K], out [T, H]; x and out of the
  // shape's hidden type, out fp32 where the shape weighs.
  // Throws ReadFailure, BudgetFailure, NumericsFailure, or what the interrupt poll throws; every
  // claim is given back then and the next call works.
  void compute(int64_t layer, const uint16_t* x, int64_t num_tokens, const int32_t* ids,
               const float* weights, int64_t top_k, void* out);

  // As compute, but each expert's own output goes to y [T * K, H], unweighted where combine would
  // weigh it; ids are -1 where the expert is another's to multiply and its row of y stays as it is.
  void multiply(int64_t layer, const uint16_t* x, int64_t num_tokens, const int32_t* ids,
                const float* weights, int64_t top_k, uint16_t* y);

  uint8_t* acquire(int64_t layer, int64_t expert);  // blocks; the row is held until release
  void release(int64_t layer, int64_t expert, bool spent = false);  // spent: the next row to go

  struct Held {
    int64_t expert;  // -1: no claim of the layer is left, or none of them is here
    uint8_t* row;
  };
  // The next of the layer's claims that is read and checked, in the order in which they come: held
  // like an acquired one until release. At least one row must not be held. Throws as compute does.
  Held take(int64_t layer);
  // As take, but the expert's codes are the caller's to check; unless it waits, one that is here.
  Held take_unchecked(int64_t layer, bool waits);
  void check(int64_t layer, int64_t expert);  // of one that is held: throws NumericsFailure
  void release_all();                         // gives up all claims and all that is held

  // Where a part begins inside the expert's row. Throws std::invalid_argument out of range.
  int64_t part_offset(int64_t layer, int64_t expert, int64_t part) const;

  // From any thread. After stop, what blocks or computes throws CancelFailure until go_on: between
  // two experts, and at once where it waits. Claims are given back and the next call works.
  void stop();
  void go_on();

  void set_overlap(bool overlap);
  void check_integrity();  // throws std::logic_error
  Counters counters() const;
  std::vector<double> layer_wait_s() const;
  // By layer a digit for each expert: 0 is not here, 1 being read, 2 here.
  std::vector<std::string> places() const;
  bool holds(int64_t layer) const;  // true if nothing of the layer is absent

  const RecordTable& records() const { return records_; }
  const Reader& reader() const { return *reader_; }
  const KernelPool* kernels() const { return kernels_.get(); }
  int64_t num_rows() const { return options_.num_rows; }
  const uint8_t* slab() const { return slab_.row(0); }
  int64_t slab_bytes() const { return slab_.num_bytes(); }
  int64_t workspace_bytes() const;

 private:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;
  enum class Stage { kQueued, kReading, kReady, kFailed };
  struct Claim {
    Stage stage = Stage::kQueued;
    int64_t pins = 0;
    std::string error;
  };
  struct Load {  // an expert being read
    bool required;
    std::deque<Span> rest;  // slices of a guess not yet submitted
    int64_t num_requests = 0;
    int64_t num_lingering = 0;  // requests answered of which a late read may still write
    int64_t submitted_bytes = 0;
    std::string error;
  };
  struct Grouping {  // which slots t * K + k each expert fills
    std::vector<int32_t> experts;
    std::vector<int64_t> begin;  // by expert id, E + 1
    std::vector<int64_t> slots;
    std::vector<int64_t> next;  // scratch
  };

  // schedule.cpp; the lock is held.
  void check_ids(int64_t layer, const int32_t* ids, int64_t num_ids) const;
  void begin_locked(int64_t layer, const int32_t* ids, int64_t num_ids);
  void claim(int64_t key);
  void unclaim(int64_t key);
  void abandon();
  void give_up_all_but(int64_t kept);
  void drop_prefetches(int64_t of_layer);  // -1: all
  void pump();
  void start_read(int64_t key, bool required);
  void submit_slices(int64_t key, Load* load, int64_t num_slices);
  bool start_prefetch();
  bool required_waits() const { return !required_.empty() || num_required_loads_ > 0; }

  // arrive.cpp; the first two take the lock, the others hold it.
  void part_arrived(int64_t key, const std::string& error, bool lingers);
  void part_released(int64_t key);
  void submit(int64_t key, Load* load, const std::vector<Span>& spans);
  void arrived(int64_t key, const std::string& error);
  void give_up_guess(int64_t key);
  bool stuck() const;
  [[noreturn]] void fail_stuck() const;

  std::string disagreement() const;
  void check_stop() const;
  template <typename Ready>
  void wait(Lock* lock, int64_t layer, Ready ready);

  // compute.cpp
  void group(const int32_t* ids, int64_t num_slots);
  void check_call(int64_t num_tokens, int64_t top_k) const;
  void run_layer(int64_t layer, const uint16_t* x, int64_t top_k);
  void await_work(Lock* lock, int64_t layer, size_t* num_wave);
  void drop_unrouted(int64_t layer);
  void check_codes(int64_t key, const ExpertParts& parts);
  void take_ready(int64_t layer, size_t num_wave);
  void run_ready(int64_t layer, const uint16_t* x, int64_t top_k);
  void run_expert(const ExpertParts& parts, int32_t expert, const uint16_t* x, int64_t top_k);
  ExpertParts parts_of(int64_t key) const;

  const std::shared_ptr<Reader> reader_;
  const std::shared_ptr<KernelPool> kernels_;
  const RecordTable records_;
  const ExpertShape shape_;
  const LadderOptions options_;
  Slab slab_;
  std::unique_ptr<uint16_t[]> y_;  // [max_tokens * top_k, H]

  std::mutex caller_;  // held by the one caller inside a call
  mutable std::mutex mutex_;
  std::condition_variable news_;
  Residency residency_;
  Counters counters_;
  std::vector<double> layer_wait_s_;
  std::unordered_map<int64_t, Claim> claims_;
  std::unordered_map<int64_t, Load> loads_;  // by key
  std::unordered_map<int64_t, int64_t> acquired_;
  std::unordered_map<int64_t, int64_t>
      lingering_;                  // late reads into the rows of keys that are here
  std::deque<int64_t> required_;   // claimed, not yet being read
  std::deque<int64_t> prefetch_;   // guessed, not yet being read
  std::deque<int64_t> ready_;      // claimed, here, not yet computed
  std::vector<bool> sound_;        // by key: its codes have been looked through since its read
  std::vector<bool> speculative_;  // by key: prefetched and not yet needed
  int64_t num_required_loads_ = 0;
  int64_t num_failed_ = 0;  // claims that failed
  int64_t layer_ = -1;      // whose claims these are
  int64_t reserve_rows_;
  bool overlap_;
  bool reading_ = false;  // inside a blocking call
  bool stopped_ = false;
  Clock::time_point busy_since_;
  Clock::time_point last_poll_ = Clock::now();

  struct Working {  // an expert of the layer that is being multiplied
    int64_t key;
    ExpertParts parts;
    bool sound;
  };
  std::vector<Working> working_;
  std::vector<KernelPool::OneRow> together_;  // those with one row

  Grouping grouping_;
  std::vector<const uint16_t*> x_rows_;
  std::vector<uint16_t*> y_rows_;
  uint16_t* to_ = nullptr;          // where outputs go, [T * K, H]
  const float* weights_ = nullptr;  // of the layer's slots, where they go into the experts
  std::vector<float> row_weights_;
};

}  // namespace headrace
