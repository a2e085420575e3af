// Keyed random numbers: Philox4x32-10 (Salmon et al., SC 2011), bit for bit those of megatron_brorl/ops/philox.py.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace brorl {

struct PhiloxWords {
  uint32_t x[4];
};

BRORL_HOST_DEVICE PhiloxWords philox(uint64_t key, PhiloxWords counter) {
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  PhiloxWords c = counter;
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * c.x[0], b = uint64_t(0xCD9E8D57u) * c.x[2];
    c = {{uint32_t(b >> 32) ^ c.x[1] ^ k0, uint32_t(b), uint32_t(a >> 32) ^ c.x[3] ^ k1, uint32_t(a)}};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// Return a number in (0, 1) with 52 random bits. key has 63 bits, index of the rollout and position of the token 32.
BRORL_HOST_DEVICE double philox_uniform(int64_t key, int64_t index, int64_t position) {
  const PhiloxWords words = philox(uint64_t(key), {{uint32_t(position), uint32_t(index), 0, 0}});
  const uint64_t bits = (uint64_t(words.x[0]) << 20) | (words.x[1] >> 12);
  return (double(bits) + 0.5) * (1.0 / 4503599627370496.0);  // 2^-52; every step is exact
}

}  // namespace brorl
