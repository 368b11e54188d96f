// Random numbers, number formats and errors of the checks (check.h).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace jaxserve {

// A sequence of random numbers: SplitMix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t word() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }

  double uniform() { return static_cast<double>(word() >> 11) * 0x1p-53; }  // in [0, 1)

  // Returns a number of mean 0 and variance 1.
  float number() {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return static_cast<float>(sum);
  }

 private:
  uint64_t state_;
};

inline uint16_t to_bfloat16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float of_bfloat16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float number;
  memcpy(&number, &bits, sizeof(number));
  return number;
}

inline float rounded_to_bfloat16(float x) { return of_bfloat16(to_bfloat16(x)); }

constexpr double kBfloat16 = 1.01 / 256;  // the relative error of a float32 number with errors of its own, rounded to bfloat16

// Memory for `count` numbers in bfloat16 or float32, which begins on a cache line. The bytes around it tell whether anything was
// written there.
class Numbers {
 public:
  Numbers(int64_t count, bool bfloat16)
      : bfloat16_(bfloat16), bytes_(static_cast<size_t>(count) * (bfloat16 ? 2 : 4)), memory_(bytes_ + 2 * kAround + 64, kMark) {
    begin_ = memory_.data() + kAround;
    begin_ += (64 - reinterpret_cast<uintptr_t>(begin_) % 64) % 64;
    std::fill_n(begin_, bytes_, '\xff');  // NaN
  }

  void* data() { return begin_; }

  // Stores a number, and returns it as stored.
  float set(int64_t i, float x) {
    if (bfloat16_) {
      const uint16_t stored = to_bfloat16(x);
      memcpy(begin_ + 2 * i, &stored, 2);
      return of_bfloat16(stored);
    }
    memcpy(begin_ + 4 * i, &x, 4);
    return x;
  }

  float get(int64_t i) const {
    uint16_t half;
    float x;
    memcpy(&half, begin_ + 2 * i, 2);
    memcpy(&x, begin_ + (bfloat16_ ? 0 : 4 * i), 4);
    return bfloat16_ ? of_bfloat16(half) : x;
  }

  bool overrun() const {
    const auto marked = [](const char* from, const char* to) { return std::all_of(from, to, [](char c) { return c == kMark; }); };
    return !marked(memory_.data(), begin_) || !marked(begin_ + bytes_, memory_.data() + memory_.size());
  }

 private:
  static constexpr size_t kAround = 256;
  static constexpr char kMark = 0x5a;
  bool bfloat16_;
  size_t bytes_;
  std::vector<char> memory_;
  char* begin_;
};

// The largest of several errors, in which a NaN stays.
class Largest {
 public:
  void add(double error, double allowed) {
    const double share = error / allowed;
    if (!(share <= largest_)) largest_ = std::isnan(share) || std::isnan(largest_) ? std::nan("") : share;
  }
  void require(bool right) { add(right ? 0 : std::numeric_limits<double>::infinity(), 1); }
  double share() const { return largest_; }

 private:
  double largest_ = 0;
};

}  // namespace jaxserve
