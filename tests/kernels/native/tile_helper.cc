// Loads a local tile configuration, as the kernels of the matrix unit do, with the instructions that every x86-64 processor has.

#include "amx.h"

void load_in_helper() {
  jaxserve::TileConfig config;
  config.set(0, 8, 16);
  jaxserve::configure_tiles(config);
}
