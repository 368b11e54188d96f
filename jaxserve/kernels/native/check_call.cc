// The list of checks (check.h) of the kernels that this machine can run, and the choice of those that may serve.

#include <array>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <vector>

#include "check.h"
#include "variants.h"

namespace jaxserve {
namespace {

// A kernel, as people read it, and its check.
struct Check {
  Work work;
  Variant variant;
  std::string kernel, precision;
  std::function<double()> error;

  std::string name() const { return kernel + ", " + kVariantNames[variant] + ", " + precision; }
};

void add_products(std::vector<Check>& all, bool bfloat16, int bits) {
  const std::string weight = bits == 16 ? "bfloat16" : "int" + std::to_string(bits);
  const std::string precision = std::string(bfloat16 ? "bfloat16" : "float32") + " x " + weight;
  const auto add = [&](Variant variant, const Multiplier& multiplier, Rounded rounded) {
    const auto error = [&multiplier, bfloat16, bits, rounded] { return check_product(multiplier, bfloat16, bits, rounded); };
    all.push_back({product_of(bfloat16, bits), variant, "product", precision, error});
  };
#if defined(__x86_64__)
  if (bfloat16) {
#if defined(__linux__)
    if (bits != 16) add(kAmxInt8, kMatmulAmxInt8, {true, false});
    add(kAmx, kMatmulAmx, {false, true});
#endif
    add(kVnni, kMatmulVnni, {true, false});
    add(kAvx512Bf16, kMatmulAvx512, {true, false});
    add(kAvx2Few, kMatmulFewAvx2, {true, false});
    add(kAvx2, kMatmulAvx2, {true, false});
  } else {
    add(kAvx2, kMatmulFloatAvx2, {});
  }
  add(kAvx512, kMatmulFloatAvx512, {});
#endif
  add(kPortable, kMatmulFloatBaseline, {});
}

void add_attention(std::vector<Check>& all, bool bfloat16, bool int8) {
  const std::string precision = std::string(bfloat16 ? "bfloat16" : "float32") + (int8 ? ", int8 pages" : "");
  const auto add = [&](Work work, const char* kernel, Variant variant, Attend attend, int64_t multiple, bool rounded = false) {
    const Supported supported = {bfloat16, int8, multiple, work == kDecoding, rounded};
    all.push_back({work, variant, kernel, precision, [attend, supported] { return check_attention(attend, supported); }});
  };
  const Work work = attention_of(bfloat16, int8);
#if defined(__x86_64__)
  if (bfloat16 && int8) add(work, "attention", kVnni, attend_vnni, 16, true);
  if (bfloat16 && !int8) {
#if defined(__linux__)
    add(work, "attention", kAmx, attend_amx, 32);
#endif
    add(work, "attention", kAvx512Bf16, attend_avx512bf16, 32, true);
    add(kDecoding, "decode attention", kAvx512Bf16, attend_decode_avx512, 32);
    add(kDecoding, "decode attention", kAvx2, attend_decode_avx2, 16);
  }
  add(work, "attention", kAvx512, attend_avx512, 32);
  add(work, "attention", kAvx2, attend_avx2, 16);
#endif
  add(work, "attention", kPortable, attend_baseline, 8);
}

std::vector<Check> all_checks() {
  std::vector<Check> all;
  for (const bool bfloat16 : {true, false}) {
    for (const int bits : {16, 8, 4, 3}) add_products(all, bfloat16, bits);
    for (const bool int8 : {false, true}) add_attention(all, bfloat16, int8);
  }
  const auto add = [&](Variant variant, const RowFunctions& rows, Draw draw, Rate rate, RoundRows round) {
    all.push_back({kRowFunctions, variant, "rows", "all", [&rows] { return check_rows(rows); }});
    all.push_back({kDrawing, variant, "draw", "float32", [draw] { return check_draw(draw); }});
    all.push_back({kRating, variant, "logprobs", "float32", [rate] { return check_rate(rate); }});
    all.push_back({kRounding, variant, "rounding", "all", [round] { return check_rounding(round); }});
  };
#if defined(__x86_64__)
  add(kAvx512, kRowsAvx512, kDrawAvx512, kRateAvx512, kRoundAvx512);
  add(kAvx2, kRowsAvx2, kDrawAvx2, kRateAvx2, kRoundAvx2);
#endif
  add(kPortable, kRowsBaseline, kDrawBaseline, kRateBaseline, kRoundBaseline);
  all.push_back({kReleasing, kPortable, "pool", "all", check_releasing});
  std::vector<Check> here;
  for (Check& check : all) {
    if (has(check.work, check.variant)) here.push_back(std::move(check));
  }
  return here;
}

const std::vector<Check>& checks() {
  static const auto* const all = new std::vector<Check>(all_checks());
  return *all;
}

}  // namespace
}  // namespace jaxserve

// Returns the number of checks, which are the kernels that this machine can run.
extern "C" int64_t jaxserve_checks() { return static_cast<int64_t>(jaxserve::checks().size()); }

// Writes the name of a check: kernel, variant and precision. A longer name is cut.
extern "C" void jaxserve_check_name(int64_t index, char* to, size_t size) {
  const std::string name = jaxserve::checks()[static_cast<size_t>(index)].name();
  const size_t length = name.size() < size ? name.size() : size - 1;
  memcpy(to, name.data(), length);
  to[length] = 0;
}

// Runs a check and returns the error as a share of the allowed one, or a negative number if there was too little memory.
extern "C" double jaxserve_check(int64_t index) {
  try {
    return jaxserve::checks()[static_cast<size_t>(index)].error();
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

// Leaves out the kernel of a check's name: from now on the next best variant computes in its place.
extern "C" void jaxserve_leave_out(const char* name) {
  for (const auto& check : jaxserve::checks()) {
    if (check.name() == name) jaxserve::leave_out(check.work, check.variant);
  }
}

// Returns whether the named kernel may serve all problems in at least one variant. Attention needs one that takes every head_dim.
extern "C" bool jaxserve_serves(const char* kernel) {
  std::array<bool, jaxserve::kWorks> named = {}, served = {};
  const bool narrow = strcmp(kernel, "attention") == 0;
  for (const auto& check : jaxserve::checks()) {
    if (check.kernel != kernel) continue;
    named[check.work] = true;
    if (narrow && check.variant != jaxserve::kAvx2 && check.variant != jaxserve::kPortable) continue;
    if (jaxserve::may(check.work, check.variant)) served[check.work] = true;
  }
  return named == served;
}
