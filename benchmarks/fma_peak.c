// Print the multiply-add operations per second of one core, two per element: of float32, or of bfloat16 products summed
// in float32 with -DBF16. Twelve independent sums hide the latency. Build with -O3 -march=native.
#include <stdio.h>
#include <time.h>

#ifdef BF16
#include <immintrin.h>
#define OPERATIONS 64.0
typedef __m512 Wide;
#define STEP(sum) _mm512_dpbf16_ps(sum, x, y)
#else
#ifdef __AVX512F__
#define BYTES 64
#else
#define BYTES 32
#endif
#define OPERATIONS (BYTES / 2.0)
typedef float Wide __attribute__((vector_size(BYTES)));
#define STEP(sum) (sum * x + y)
#endif

enum { SUMS = 12, COUNT = 20000000, ROUNDS = 10 };

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

int main(void) {
#ifdef BF16
  const __m512bh x = (__m512bh)_mm512_set1_epi16(0x3f80), y = x;
#else
  const Wide x = (Wide){} + 0.999f, y = (Wide){} + 1e-6f;
#endif
  Wide sums[SUMS] = {};
  double best = 1e9;
  for (int round = 0; round < ROUNDS; ++round) {
    const double start = now();
    for (int i = 0; i < COUNT; ++i) {
#pragma GCC unroll 12
      for (int s = 0; s < SUMS; ++s) sums[s] = STEP(sums[s]);
    }
    const double seconds = now() - start;
    if (seconds < best) best = seconds;
  }
  float total = 0;
  for (int s = 0; s < SUMS; ++s) total += sums[s][0];
  volatile float kept = total;  // The compiler would remove a loop without a result.
  (void)kept;
  printf("%.0f\n", OPERATIONS * SUMS * COUNT / best);
}
