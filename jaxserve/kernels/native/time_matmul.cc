// Timing of products on the machine that they are to serve on, from which jaxserve/kernels/native/choices.py learns which kernel is
// fastest for which rows. It runs in a process of its own, like the checks (check.h), and on one thread.
//
// The variants of a product take turns, so that a busy machine is no disadvantage for any. Weights come from memory that is larger
// than most caches, each time from another place, as the weights of a model do.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "check_numbers.h"
#include "choice.h"
#include "parallel.h"

namespace jaxserve {
namespace {

constexpr int64_t kPoolBytes = 64 << 20;
constexpr int64_t kRandomBytes = 1 << 20;
constexpr int kMinRounds = 3, kMaxRounds = 15;
constexpr int64_t kManyRows = 32, kFewOuts = 128;  // more rows are multiplied by few outputs, so that other work interrupts little
constexpr double kHopeless = 2;  // times of the fastest, after which a variant is not timed again

// A product to be timed. Its weight has the shape of a part of a small or of a large model's layer.
struct Timed {
  int bits;
  bool wide;
  int64_t rows;

  explicit Timed(int64_t index)  // few rows come first, as they take least time
      : bits(kTimedBits[index / 2 % kTimedPrecisions]), wide(index % 2 != 0), rows(kTimedRows[index / (2 * kTimedPrecisions)]) {}

  Weight weight() const {
    Weight w = {};
    w.bits = bits;
    w.out = rows > kManyRows ? kFewOuts : wide ? 512 : 768;
    w.inner = wide ? 2048 : 576;
    w.group = bits == 16 ? w.inner : wide ? 128 : 64;
    w.groups = w.inner / w.group;
    const int64_t padded = (w.inner + 255) / 256 * 256;
    w.row_bytes = bits == 16 ? 2 * w.inner : bits == 8 ? w.inner : bits == 4 ? (w.inner + 127) / 128 * 64 : padded * 3 / 8;
    return w;
  }
};

// Memory of random bytes that are numbers of about 1 in bfloat16, and codes.
const std::vector<uint16_t>& pool() {
  static const auto* const numbers = [] {
    auto* all = new std::vector<uint16_t>(kPoolBytes / 2);
    Random random(1);
    for (int64_t i = 0; i < kRandomBytes / 2; ++i) (*all)[static_cast<size_t>(i)] = static_cast<uint16_t>(0x3f00 | (random.word() & 0x80ff));
    for (int64_t at = kRandomBytes; at < kPoolBytes; at += kRandomBytes) memcpy(all->data() + at / 2, all->data(), kRandomBytes);
    return all;
  }();
  return *numbers;
}

// The operands and the memory of a product.
struct Problem {
  Weight w;
  Numbers x, y, scales;

  explicit Problem(const Timed& timed)
      : w(timed.weight()), x(timed.rows * w.inner, true), y(timed.rows * w.out, true), scales(w.out * w.groups, true) {
    Random random(2);
    for (int64_t i = 0; i < timed.rows * w.inner; ++i) x.set(i, static_cast<float>(random.uniform()) - 0.5f);
    for (int64_t i = 0; i < w.out * w.groups; ++i) scales.set(i, 0.01f);
    w.scales = w.bits == 16 ? nullptr : scales.data();
  }

  // Returns the time (s) of a product by the variant, of a weight at another place than the last one's. The packing of x does not
  // count: with all outputs of a weight it hardly matters.
  double seconds(const Multiplier& variant, int64_t rows) {
    static int64_t place = 0;
    const int64_t bytes = (w.out * w.row_bytes + 63) / 64 * 64;
    if (place + bytes > kPoolBytes) place = 0;
    w.data = reinterpret_cast<const uint8_t*>(pool().data()) + place;
    place += bytes;
    const Matmul m = {x.data(), y.data(), true, true, rows, w};
    const Scratch packed(variant.packed_bytes(m)), scratch(variant.scratch_bytes(m));
    for (int64_t row = 0; row < rows && variant.packed_bytes(m); row += kPackRows) variant.pack(m, row, packed.get());
    const auto begin = std::chrono::steady_clock::now();
    const Block size = variant.block(m);
    const auto of = [&](int64_t row, int64_t out) {
      return Block{out, std::min(size.outs, w.out - out), row, std::min(size.rows, rows - row)};
    };
    for (int64_t row = 0; row < rows; row += size.rows) {
      for (int64_t out = 0; out < w.out; out += size.outs) {
        const bool more = out + size.outs < w.out;
        const Block after = more ? of(row, out + size.outs) : Block{};
        variant.multiply(m, packed.get(), of(row, out), more ? &after : nullptr, scratch.get());
      }
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
};

struct Candidate {
  Variant variant;
  const Multiplier* kernel;
  double least = 1e9;  // s

};

std::vector<Candidate> candidates(const Timed& timed) {
  std::vector<Candidate> all;
  for (int variant = 0; variant < kPortable || (variant < kVariants && all.empty()); ++variant) {
    const auto* kernel = kernel_of(static_cast<Variant>(variant), true, product_of(true, timed.bits));
    if (kernel) all.push_back({static_cast<Variant>(variant), kernel});
  }
  return all;
}

// Times a product for about so many seconds, and returns its name, the usual variant, and each variant with the least of its times in
// seconds.
std::string time_product(const Timed& timed, double seconds) {
  std::vector<Candidate> all = candidates(timed);
  Problem problem(timed);
  const Variant rule = usual(true, timed.rows, problem.w);
  const auto begin = std::chrono::steady_clock::now();
  double fastest = 1e9;
  for (int round = 0; round < kMaxRounds; ++round) {
    for (Candidate& candidate : all) {
      const bool hopeless = round > 1 && candidate.variant != rule && candidate.least > kHopeless * fastest;
      if (!hopeless) candidate.least = std::min(candidate.least, problem.seconds(*candidate.kernel, timed.rows));
    }
    for (const Candidate& candidate : all) fastest = std::min(fastest, candidate.least);
    const double passed = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (round + 1 >= kMinRounds && passed > seconds) break;
  }
  std::string line = std::to_string(timed.bits) + (timed.wide ? " wide " : " narrow ") + std::to_string(timed.rows) + " " +
                     (rule == kVariants ? "none" : kVariantNames[rule]);
  for (const Candidate& candidate : all) {
    char numbers[32];
    snprintf(numbers, sizeof(numbers), " %.3e", candidate.least);
    line += std::string(" ") + kVariantNames[candidate.variant] + numbers;
  }
  return line;
}

}  // namespace
}  // namespace jaxserve

// Returns the number of products that are timed.
extern "C" int64_t jaxserve_timed_products() { return jaxserve::kTimedCounts * jaxserve::kTimedPrecisions * 2; }

// Writes what `time_product` returns. A longer text is cut; it is empty if there was too little memory.
extern "C" void jaxserve_time_product(int64_t index, double seconds, char* to, size_t size) {
  std::string line;
  try {
    line = jaxserve::time_product(jaxserve::Timed(index), seconds);
  } catch (const std::bad_alloc&) {
  }
  const size_t length = std::min(line.size(), size - 1);
  memcpy(to, line.data(), length);
  to[length] = 0;
}
