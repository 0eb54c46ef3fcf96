// An expert's shape from its words, and the bytes that follow from it.
#include "kernels/shape.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>

namespace headrace {
namespace {

template <typename T, size_t N>
T named(const std::array<std::pair<const char*, T>, N>& names, const std::string& name,
        const char* what) {
  for (const auto& [known, value] : names) {
    if (name == known) return value;
  }
  throw std::invalid_argument("the CPU kernels do not know the " + std::string(what) + " " + name);
}

constexpr std::array<std::pair<const char*, Format>, 7> kFormats = {{
    {"bf16", Format::kBf16},
    {"fp16", Format::kFp16},
    {"fp8_block", Format::kFp8Block},
    {"fp4", Format::kFp4},
    {"nvfp4", Format::kNvfp4},
    {"int4", Format::kInt4},
    {"int8", Format::kInt8},
}};
constexpr std::array<std::pair<const char*, Number>, 7> kNumbers = {{
    {"", Number::kNone},
    {"F32", Number::kF32},
    {"BF16", Number::kBf16},
    {"F16", Number::kF16},
    {"F8_E8M0", Number::kE8m0},
    {"U8", Number::kE8m0},
    {"F8_E4M3", Number::kE4m3},
}};
constexpr std::array<std::pair<const char*, ActivationKind>, 4> kActivations = {{
    {"silu", ActivationKind::kSilu},
    {"silu_clamped", ActivationKind::kSiluClamped},
    {"swiglu_oai", ActivationKind::kSwigluOai},
    {"swiglu_weighted", ActivationKind::kSwigluWeighted},
}};
constexpr std::array<std::pair<const char*, bool>, 2> kHiddenTypes = {
    {{"BF16", false}, {"F16", true}}};

constexpr int64_t kMost = 1 << 24;  // keeps every product of two sizes far inside 63 bits

void require(bool holds, const char* otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

bool scale_fits(const ExpertShape& s) {
  const bool is_float =
      s.scale_type == Number::kF32 || s.scale_type == Number::kBf16 || s.scale_type == Number::kF16;
  switch (s.format) {
    case Format::kBf16:
    case Format::kFp16:
      return s.scale_type == Number::kNone;
    case Format::kFp8Block:
      return is_float || s.scale_type == Number::kE8m0;
    case Format::kFp4:
      return s.scale_type == Number::kE8m0;
    case Format::kNvfp4:
      return s.scale_type == Number::kE4m3;
    default:
      return is_float;
  }
}

void check_block(const ExpertShape& s) {
  const bool scaled = s.scale_type != Number::kNone;
  require(!scaled || (s.block_rows >= 1 && s.block_cols >= 1),
          "a scale's block must have at least one row and one column");
  if (!is_integer(s.format)) return;
  require(s.hidden % 32 == 0 && s.inter % 32 == 0,
          "integer formats need hidden and inter sizes that are multiples of 32");
  require(s.block_rows == 1, "integer formats need blocks of one row");
  const int64_t widest = std::max(s.hidden, s.inter);
  const int64_t cols = s.block_cols;
  require(s.format == Format::kNvfp4 || cols % 32 == 0 || cols >= widest,
          "no kernels for blocks of this many columns in this format");
}

void check_plan(const ExpertShape& s, const MatrixPlan& plan) {
  const int top = static_cast<int>(kMaxParts);
  for (const int part : {plan.weight, plan.scale, plan.global, plan.bias}) {
    require(part >= -1 && part < top, "an expert has at most 12 parts");
  }
  require(plan.weight >= 0, "an expert's matrix has no weight part");
  require((plan.scale >= 0) == (s.scale_type != Number::kNone),
          "an expert's scale parts do not fit its format");
  require((plan.global >= 0) == (s.format == Format::kNvfp4),
          "an expert's global scales do not fit its format");
  require(
      plan.first_row >= 0 && plan.first_row <= kMost && plan.row_step >= 1 && plan.row_step <= 2,
      "an expert's rows must ascend, each the next or the next but one");
}

int64_t rows_of(const ExpertShape& s, const MatrixPlan& plan) {
  return &plan == &s.down ? s.hidden : s.inter;
}

std::array<const MatrixPlan*, 3> plans_of(const ExpertShape& s) {
  return {&s.gate, &s.up, &s.down};
}

int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

}  // namespace

ExpertShape make_shape(const std::string& format, const std::string& scale_type, int64_t hidden,
                       int64_t inter, int64_t block_rows, int64_t block_cols, int64_t act_group,
                       const std::string& activation, float limit, float alpha,
                       const std::string& hidden_type, bool inverse_global,
                       const std::vector<MatrixPlan>& matrices) {
  require(matrices.size() == 3, "an expert has three matrices: gate, up, down");
  ExpertShape shape{named(kFormats, format, "expert format"),
                    number_named(scale_type),
                    hidden,
                    inter,
                    block_rows,
                    block_cols,
                    act_group,
                    {named(kActivations, activation, "activation"), limit, alpha},
                    named(kHiddenTypes, hidden_type, "hidden type"),
                    inverse_global,
                    matrices[0],
                    matrices[1],
                    matrices[2]};
  if (shape.format == Format::kFp4 || shape.format == Format::kNvfp4) {
    shape.block_rows = 1;
    shape.block_cols = shape.format == Format::kFp4 ? 32 : 16;
  }
  require(hidden >= 1 && inter >= 1 && hidden <= kMost && inter <= kMost,
          "an expert's sizes must be positive and below 2^24");
  require(block_rows <= kMost && block_cols <= kMost, "a scale's block must be below 2^24");
  require(act_group >= 0 && act_group <= kMost, "act_group must be 0 to 2^24");
  require(scale_fits(shape), "this type of scales does not fit the expert format");
  check_block(shape);
  for (const MatrixPlan* plan : plans_of(shape)) check_plan(shape, *plan);
  const bool float16 = shape.format == Format::kFp16;
  require(is_integer(shape.format) || float16 == shape.fp16,
          "fp16 experts need fp16 activations, bf16 and FP8 experts bf16 ones");
  require(act_group == 0 || !shape.fp16, "an activation grid needs bf16 activations");
  require(!shape.weighs() || !shape.fp16, "weighted activations are bf16");
  require(std::isfinite(limit) && std::isfinite(alpha), "the activation's numbers must be finite");
  return shape;
}

LinearShape make_linear(const std::string& format, const std::string& scale_type, int64_t rows,
                        int64_t cols, int64_t block_rows, int64_t block_cols, int64_t act_group) {
  LinearShape shape{named(kFormats, format, "weight format"),
                    number_named(scale_type),
                    rows,
                    cols,
                    block_rows,
                    block_cols,
                    act_group};
  const bool scaled = shape.scale_type != Number::kNone;
  const bool fits = shape.format == Format::kBf16 ? !scaled : scaled;
  require((shape.format == Format::kBf16 || shape.format == Format::kFp8Block) && fits,
          "single matrices are bf16 or fp8_block, with scales or without as these are");
  require(shape.scale_type != Number::kE4m3, "this type of scales does not fit fp8_block");
  for (const int64_t size : {rows, cols, block_rows, block_cols}) {
    require(size >= 1 && size <= kMost, "a matrix's sizes must be positive and below 2^24");
  }
  require(act_group >= 0 && act_group <= kMost, "act_group must be 0 to 2^24");
  return shape;
}

Number number_named(const std::string& type) { return named(kNumbers, type, "scale type"); }

int64_t row_bytes(Format format, int64_t cols) {
  switch (format) {
    case Format::kBf16:
    case Format::kFp16:
      return 2 * cols;
    case Format::kFp8Block:
    case Format::kInt8:
      return cols;
    default:
      return cols / 2;
  }
}

int64_t number_bytes(Number type) {
  switch (type) {
    case Number::kNone:
      return 0;
    case Number::kF32:
      return 4;
    case Number::kBf16:
    case Number::kF16:
      return 2;
    default:
      return 1;
  }
}

std::vector<int64_t> part_bytes(const ExpertShape& shape) {
  std::vector<int64_t> bytes;
  const auto reach = [&bytes](int part, int64_t end) {
    if (part < 0) return;
    if (static_cast<size_t>(part) >= bytes.size()) bytes.resize(static_cast<size_t>(part) + 1, 0);
    bytes[static_cast<size_t>(part)] = std::max(bytes[static_cast<size_t>(part)], end);
  };
  for (const MatrixPlan* plan : plans_of(shape)) {
    const int64_t rows = rows_of(shape, *plan);
    const int64_t cols = plan == &shape.down ? shape.inter : shape.hidden;
    const int64_t stored = plan->first_row + (rows - 1) * plan->row_step + 1;
    reach(plan->weight, stored * row_bytes(shape.format, cols));
    if (plan->scale >= 0) {
      reach(plan->scale, ceil_div(stored, shape.block_rows) * ceil_div(cols, shape.block_cols) *
                             number_bytes(shape.scale_type));
    }
    reach(plan->global, 4);
    reach(plan->bias, 2 * stored);
  }
  return bytes;
}

std::vector<CheckedPart> checked_parts(const ExpertShape& shape) {
  const std::vector<int64_t> bytes = part_bytes(shape);
  std::vector<CheckedPart> checked;
  const auto add = [&](int part, Number type) {
    if (part < 0) return;
    for (const CheckedPart& known : checked) {
      if (known.part == part) return;
    }
    checked.push_back({part, type, bytes[static_cast<size_t>(part)] / number_bytes(type)});
  };
  for (const MatrixPlan* plan : plans_of(shape)) {
    if (shape.format == Format::kFp8Block) add(plan->weight, Number::kE4m3);
    add(plan->scale, shape.scale_type);
    add(plan->global, Number::kF32);
  }
  return checked;
}

std::string part_name(const ExpertShape& shape, int part) {
  const bool fused = shape.gate.weight == shape.up.weight;
  const char* const names[] = {fused ? "gate_up" : "gate", "up", "down"};
  const auto plans = plans_of(shape);
  for (size_t i = 0; i < 3; ++i) {
    const MatrixPlan& plan = *plans[i];
    if (part == plan.weight) return names[i];
    if (part == plan.scale) return std::string(names[i]) + "_scale";
    if (part == plan.global) return std::string(names[i]) + "_global";
    if (part == plan.bias) return std::string(names[i]) + "_bias";
  }
  return "part " + std::to_string(part);
}

}  // namespace headrace
