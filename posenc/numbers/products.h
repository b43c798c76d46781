/* Products of bfloat16 with sums in float32, for processors that multiply bfloat16 in vectors.
   Where they do it in tiles (AMX), oneDNN's products were measured instead: there, and on
   processors without, BF16_IN_VECTORS stays undefined and nothing of this is compiled. */

#include "floats.h"
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && !defined(__AMX_BF16__)
#define BF16_IN_VECTORS
#include <immintrin.h>
#include <stdlib.h>

typedef uint32_t pair; /* two neighbours along the axis that a product sums over */

#define BLOCK 32 /* rows that are done together; what is read is filled up to it with zeros */

static inline int64_t full(int64_t n) { return (n + BLOCK - 1) / BLOCK * BLOCK; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
/* Those of 16 or 32 numbers from j on that lie before `end`. */
static inline __mmask16 half(int64_t j, int64_t end) {
  return end <= j ? 0 : end - j < 16 ? (1u << (end - j)) - 1 : 0xffff;
}
static inline __mmask32 whole(int64_t j, int64_t end) {
  return half(j, end) | (__mmask32)half(j + 16, end) << 16;
}
static inline __m512 widen_16(__m256i v) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}
static inline __m512i narrow_32(__m512 low, __m512 high) {
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}
static inline __m512i pair_up(__m256i one, __m256i two) {
  __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32(two), 16);
  return _mm512_or_si512(_mm512_cvtepu16_epi32(one), upper);
}
static void *carve(char **room, int64_t bytes) {
  void *piece = *room;
  *room += bytes;
  return piece;
}

/* A matrix in panels: strips of BLOCK columns, one after the other, of PANEL(rows) pairs each. */
#define PANEL(rows) (BLOCK / 2 * (rows))
#define STEPS 128 /* pairs of a panel that stay in the first cache while all rows pass */

/* c[m][n] = sum over k of a[m][k] * b[k][n], k in pairs and b in panels; added to what is there, if
   `add`. */
static void multiply(const pair *a, int64_t a_row, int64_t a_step, const pair *b, int64_t panel,
                     float *c, int64_t c_row, int64_t rows, int64_t columns, int64_t steps,
                     int add) {
  for (int64_t from = 0; from < steps || !from; from += STEPS, add = 1)
    for (int64_t n = 0; n < columns; n += BLOCK)
      for (int64_t m = 0; m < rows; m += 8) {
        __m512 low[8], high[8];
        float *at = c + m * c_row + n;
        for (int r = 0; r < 8; r++) {
          low[r] = add ? _mm512_loadu_ps(at + r * c_row) : _mm512_setzero_ps();
          high[r] = add ? _mm512_loadu_ps(at + r * c_row + 16) : _mm512_setzero_ps();
        }
        const pair *left = a + m * a_row + from * a_step;
        const pair *right = b + n / BLOCK * panel + from * BLOCK;
        for (int64_t k = least(STEPS, steps - from); k > 0; k--, left += a_step, right += BLOCK) {
          __m512bh first = (__m512bh)_mm512_loadu_si512(right);
          __m512bh second = (__m512bh)_mm512_loadu_si512(right + 16);
#pragma GCC unroll 8
          for (int r = 0; r < 8; r++) {
            __m512bh one = (__m512bh)_mm512_set1_epi32((int)left[r * a_row]);
            low[r] = _mm512_dpbf16_ps(low[r], one, first);
            high[r] = _mm512_dpbf16_ps(high[r], one, second);
          }
        }
        for (int r = 0; r < 8; r++) {
          _mm512_storeu_ps(at + r * c_row, low[r]);
          _mm512_storeu_ps(at + r * c_row + 16, high[r]);
        }
      }
}

/* to[i][j] = from[i][j] */
static void take(const bf16 *from, int64_t stride, int64_t rows, int64_t width, bf16 *to) {
  for (int64_t i = 0; i < full(rows); i++)
    for (int64_t j = 0; j < full(width); j += 32, to += 32) {
      __mmask32 here = i < rows ? whole(j, width) : 0;
      _mm512_storeu_si512(to, _mm512_maskz_loadu_epi16(here, from + i * stride + j));
    }
}

/* The pairs (from[i][j], from[i + 1][j]), in panels. */
static void weave(const bf16 *from, int64_t stride, int64_t rows, int64_t width, pair *to,
                  int64_t panel) {
  for (int64_t j = 0; j < full(width); j += 16)
    for (int64_t i = 0; i < full(rows); i += 2) {
      const bf16 *at = from + i * stride + j;
      __mmask16 here = i < rows ? half(j, width) : 0, below = i + 1 < rows ? here : 0;
      __m256i one = _mm256_maskz_loadu_epi16(here, at);
      __m256i two = _mm256_maskz_loadu_epi16(below, at + stride);
      _mm512_storeu_si512(to + j / BLOCK * panel + i / 2 * BLOCK + j % BLOCK, pair_up(one, two));
    }
}

/* The pairs (from[i][j], from[i][j + 1]) of a panel's 32 rows i side by side; `room` is for BLOCK
   rows. */
static void turn(const bf16 *from, int64_t stride, int64_t rows, int64_t width, bf16 *room,
                 pair *to, int64_t panel) {
  const pair *pairs = (const pair *)room;
  int64_t wide = full(width) / 2;
  for (int64_t i = 0; i < rows; i += BLOCK, to += panel) {
    take(from + i * stride, stride, least(BLOCK, rows - i), width, room);
    for (int64_t j = 0; j < wide; j++)
      for (int64_t r = 0; r < BLOCK; r++) to[j * BLOCK + r] = pairs[r * wide + j];
  }
}

/* Rows of full(width) numbers, rounded; those of `to` are `stride` apart. */
static void put(const float *from, int64_t rows, int64_t width, bf16 *to, int64_t stride) {
  for (int64_t i = 0; i < rows; i++, to += stride)
    for (int64_t j = 0; j < full(width); j += 32, from += 32) {
      __m512i both = narrow_32(_mm512_loadu_ps(from), _mm512_loadu_ps(from + 16));
      _mm512_mask_storeu_epi16(to + j, whole(j, width), both);
    }
}

/* e^x within 4e-6 of itself for |x| <= 87, infinite from 89 on; NaN stays NaN. */
static inline __m512 powers(__m512 x) {
  __m512 turns = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
  __m512 floor = _mm512_roundscale_ps(turns, 0), r = _mm512_sub_ps(turns, floor);
  static const float terms[] = {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f,
                                2.4022651e-1f, 6.9314718e-1f, 1.f};
  __m512 p = _mm512_set1_ps(1.5403530e-4f);
  for (int i = 0; i < 6; i++) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(terms[i]));
  return _mm512_scalef_ps(p, floor);
}

int suits(void) { return 1; }
#else
int suits(void) { return 0; } /* this processor: the library has no other function */
#endif
