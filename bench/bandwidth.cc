// Reads memory and does as little else as possible. bench/bandwidth.py times this function.

#include <cstddef>
#include <cstdint>

namespace {

// Streams that are read in turn. Several streams keep more prefetchers busy than one.
constexpr std::size_t kStreams = 4;
// Words that are read from one stream before the next: four cache lines.
constexpr std::size_t kBlock = 32;

}  // namespace

// Returns the exclusive or of all words except an incomplete block at the end of each stream. The result keeps the
// compiler from removing the reads.
extern "C" std::uint64_t jaxserve_read(const std::uint64_t* data, std::size_t words) {
  const std::size_t length = words / kStreams / kBlock * kBlock;
  std::uint64_t sums[kBlock] = {};
  for (std::size_t i = 0; i < length; i += kBlock) {
    for (std::size_t stream = 0; stream < kStreams; ++stream) {
      const std::uint64_t* block = data + stream * length + i;
      for (std::size_t j = 0; j < kBlock; ++j) sums[j] ^= block[j];
    }
  }
  std::uint64_t sum = 0;
  for (std::uint64_t partial : sums) sum ^= partial;
  return sum;
}
