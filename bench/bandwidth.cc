// Reads memory and does as little else as possible: what bench/bandwidth.py times.

#include <cstddef>
#include <cstdint>

namespace {

constexpr std::size_t kStreams = 4;  // places that are read in turn, which keeps more of the prefetchers busy than one
constexpr std::size_t kBlock = 32;   // words of one stream before the next one's turn: four cache lines

}  // namespace

// The exclusive or of all words but those of an unfinished block at the end of each stream; returned so that the reads
// cannot be left out.
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
