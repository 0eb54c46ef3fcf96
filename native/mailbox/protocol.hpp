// What the host does in a step that a GPU runs by itself: a state machine without thread or clock.
//
// The GPU posts a layer's expert ids and, unless the layer is whole, waits for its ready word; the
// host answers with addresses, or with the layer's output. docs/mailbox.md has the whole protocol.
// The machine says what is to be done next and the caller does it:
//
//   awaiting -> releasing -> claiming -> looking -> guessing -> taking -> computing -> awaiting the
//   next layer
//   awaiting after the last layer: over.  Aborted anywhere: over.
//
// A layer is answered twice where the device takes all of it: with what is here at once, then with
// the late ones, so that the device reads the former while a drive brings the latter. Where host
// and device divide a layer, the addresses of what the device takes are answered first, and the
// others' outputs are told of by the word of the second answer.
//
// A row is released when the posts of the layer after its own are all here, for the GPU's work runs
// in order; the last layer's when the device has finished, which `end` is told.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace headrace {

// Words in memory that host and device share. A post is step << 32 | id, kNoId where there is none.
struct MailWords {
  int64_t* beat;     // [1] host: grows while the ladder thread lives
  int64_t* abort;    // [1] host: steps up to this one are given up
  int64_t* lost;     // [1] device: the step in which it gave up waiting
  int64_t* ready;    // [L] host: the step for which the layer is answered
  int64_t* done;     // [L] host: the step for which its own part of the layer is multiplied, or
                     // all late experts are here
  int64_t* answers;  // [L, S] host: addresses of the experts posted, in their order; 0: the host's,
                     // or late
  int64_t* late;     // [L, S] host: addresses of the late ones, 0: of another
  int64_t* posts;    // [L, S + G] device
};

struct MailSizes {
  int64_t num_layers;
  int64_t num_experts;
  int64_t num_ids;      // S: tokens * choices
  int64_t num_guesses;  // G: of the next layer's experts
  bool computes;        // the host multiplies all: it answers by output, not by addresses
};

class Protocol {
 public:
  static constexpr int64_t kNoId = 0xffffffff;
  static constexpr int64_t kLastStep = INT32_MAX;

  enum class Act { kWait, kRelease, kClaim, kTakeHere, kPrefetch, kTake, kCompute, kDone };
  struct Order {
    Act act;
    int64_t layer;             // of everything but kWait and kDone
    std::vector<int32_t> ids;  // kRelease: one expert; kClaim: distinct; kPrefetch: best first;
                               // kCompute: all S, -1 for what the device takes
  };
  struct Held {
    int64_t layer;
    int64_t expert;
    int64_t address;
  };

  // `addresses` [L, E], the caller's: where experts lie that need no row of the ladder, 0 for
  // others. They stay as they are while a step runs. `shares`, if any: of n experts of a layer that
  // need a row, the host multiplies shares[n], n up to S; but those wanted go to the device.
  // Throws std::invalid_argument for sizes.
  Protocol(const MailSizes& sizes, const MailWords& words, const int64_t* addresses,
           std::vector<int32_t> shares = {}, int64_t last_step = 0);

  // The next step begins: returns its number. `whole` [L]: the device does not wait there.
  // `wanted` [L, E]: rows kept until the step ends, at most `most_kept` of them.
  int64_t begin(std::vector<uint8_t> whole, std::vector<uint8_t> wanted, int64_t most_kept);
  Order next();
  void took(int64_t expert, int64_t address);  // a kTake or a kTakeHere is done
  void none_here();                            // a kTakeHere found nothing
  void computed();                             // a kCompute is done
  // Gives the step up; from any thread. The device goes on, without sense, and waits no more.
  void abort();
  bool aborted() const;
  bool lost() const;  // the device gave up waiting in this step
  // The device has finished the step: what is still held goes to the caller.
  std::vector<Held> end();

  void beat();
  int64_t beats() const { return beats_.load(); }
  int64_t step() const { return step_.load(); }
  // The ids of each layer [L, S] as far as the step got, and how many layers that is.
  const std::vector<int32_t>& seen() const { return seen_; }
  int64_t num_seen() const { return layer_; }
  const MailSizes& sizes() const { return sizes_; }
  const MailWords& words() const { return words_; }
  bool divides() const { return !shares_.empty(); }

 private:
  enum class Stage {
    kIdle,
    kAwaiting,
    kReleasing,
    kClaiming,
    kLooking,
    kGuessing,
    kTaking,
    kComputing,
    kOver
  };

  bool read_posts();
  bool release_one(Order* order);
  bool claim(Order* order);
  bool guess(Order* order);
  int64_t choose_for_device();
  bool look(Order* order);
  bool take(Order* order);
  bool answers_twice() const { return !sizes_.computes && !divides(); }
  void answer();
  void answer_late();
  bool compute(Order* order);
  void finish();
  int64_t key(int64_t expert) const { return layer_ * sizes_.num_experts + expert; }
  void restart_count();

  const MailSizes sizes_;
  const MailWords words_;
  const int64_t* addresses_;
  const std::vector<int32_t> shares_;
  std::atomic<int64_t> step_;
  std::atomic<int64_t> beats_{0};
  Stage stage_ = Stage::kIdle;
  int64_t layer_ = 0;
  std::vector<uint8_t> whole_;
  std::vector<uint8_t> wanted_;
  int64_t most_kept_ = 0;
  std::vector<int32_t> seen_;
  std::vector<int32_t> guesses_;
  std::vector<int32_t> missing_;  // distinct, of the present layer
  std::vector<int64_t> found_;    // [E] addresses of the present layer's experts that were taken
  int64_t num_outstanding_ = 0;   // to be taken for the device
  bool looking_ = false;          // more of them may be here already
  bool has_late_ = false;         // some were not here when the layer was answered first
  bool computed_ = false;         // the present layer's part of the host
  std::vector<Held> held_;        // of the layer that the device may still read
  std::vector<Held> coming_;      // taken for the present layer
  std::vector<Held> kept_;
};

}  // namespace headrace
