/* down(silu(gate(x)) * up(x)) in bfloat16, ROWS tokens at a time, so that what lies between the
   three products stays in the cache. Called by swiglu.py. */

#include "products.h"
#ifdef BF16_IN_VECTORS

#define ROWS 128

/* `weights` are those of gate and up, (2 hidden, in), and `both` is what they give, (tokens,
   2 hidden); `down` is (out, hidden). All widths are multiples of BLOCK. `group` tokens share a
   place to add up the gradients of weights, so that these do not depend on who computes which. */
typedef struct {
  int64_t tokens, in, hidden, out, group;
} Sizes;

/* 1 / (1 + e^-x) within 7e-5 of itself from -87 on, 0 from -89 down. Rounding to bfloat16 changes
   30 times as much, and 4 times what is left of it in the slope of a gate near 17. */
static inline __m512 sigmoid(__m512 x) {
  __m512 power = powers(_mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_rcp14_ps(_mm512_add_ps(_mm512_set1_ps(1), power));
}
static inline __m256i rounded(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

typedef struct {
  const bf16 *x, *weights, *down;
  bf16 *both, *out;
  Sizes sizes;
} Forward;

/* `out` and `both` for blocks first..last of ROWS tokens. Returns 1 where there is no memory. */
int forward(const Forward *of, int64_t first, int64_t last) {
  int64_t in = of->sizes.in, H = of->sizes.hidden, O = of->sizes.out, tokens = of->sizes.tokens;
  char *memory = aligned_alloc(64, 2 * H * (2 * in + O) + 2 * (ROWS + BLOCK) * (in + H) +
                                       4 * ROWS * (2 * BLOCK + O));
  if (!memory) return 1;
  char *room = memory;
  pair *gates = carve(&room, 2 * H * in), *ups = carve(&room, 2 * H * in);
  pair *downs = carve(&room, 2 * H * O);
  bf16 *x = carve(&room, 2 * ROWS * in), *hidden = carve(&room, 2 * ROWS * H);
  bf16 *spare = carve(&room, 2 * BLOCK * (in + H));
  float *a = carve(&room, 4 * ROWS * BLOCK), *b = carve(&room, 4 * ROWS * BLOCK);
  float *result = carve(&room, 4 * ROWS * O);
  turn(of->weights, in, H, in, spare, gates, PANEL(in));
  turn(of->weights + H * in, in, H, in, spare, ups, PANEL(in));
  turn(of->down, H, O, H, spare, downs, PANEL(H));
  for (int64_t t = first * ROWS; t < least(last * ROWS, tokens); t += ROWS) {
    int64_t rows = least(ROWS, tokens - t), high = full(rows);
    take(of->x + t * in, in, rows, in, x);
    for (int64_t j = 0; j < H; j += BLOCK) {
      int64_t at = j / BLOCK * PANEL(in);
      multiply((pair *)x, in / 2, 1, gates + at, 0, a, BLOCK, high, BLOCK, in / 2, 0);
      multiply((pair *)x, in / 2, 1, ups + at, 0, b, BLOCK, high, BLOCK, in / 2, 0);
      for (int64_t n = 0; n < 2 * rows; n++) { /* half a row of the panel each */
        __m256i gate = rounded(_mm512_load_ps(a + 16 * n));
        __m256i up = rounded(_mm512_load_ps(b + 16 * n));
        __m512 wide = widen_16(gate), y = _mm512_mul_ps(wide, sigmoid(wide));
        int64_t row = n / 2, column = j + n % 2 * 16;
        bf16 *to = of->both + (t + row) * 2 * H + column;
        _mm256_storeu_si256((__m256i *)to, gate);
        _mm256_storeu_si256((__m256i *)(to + H), up);
        y = _mm512_mul_ps(y, widen_16(up));
        _mm256_store_si256((__m256i *)(hidden + row * H + column), rounded(y));
      }
    }
    multiply((pair *)hidden, H / 2, 1, downs, PANEL(H), result, O, high, O, H / 2, 0);
    put(result, rows, O, of->out + t * O, O);
  }
  free(memory);
  return 0;
}

typedef struct {
  const bf16 *grad, *x, *weights, *down, *both;
  float *d_x, *d_weights, *d_down;
  Sizes sizes;
} Backward;

/* What one block of tokens keeps of the gradients of a panel of BLOCK hidden columns. */
typedef struct {
  float *products;          /* (ROWS, BLOCK), behind the gate */
  pair *gate, *up, *hidden; /* a panel each; `hidden` is the value, made again */
} Panel;

/* From the gradients behind the gate to those before it, which also go to d_both, (ROWS, 2 hidden),
   in rows. */
static void unfold(const bf16 *both, int64_t rows, int64_t H, const Panel *of, bf16 *d_both) {
  __m512 one = _mm512_set1_ps(1);
  for (int64_t i = 0; i < full(rows); i += 2)
    for (int64_t k = 0; k < BLOCK; k += 16) {
      __m256i gate[2], up[2], hidden[2];
      for (int64_t r = 0; r < 2; r++) {
        __mmask16 here = i + r < rows ? 0xffff : 0;
        const bf16 *from = both + (i + r) * 2 * H + k;
        __m512 a = widen_16(_mm256_maskz_loadu_epi16(here, from));
        __m512 b = widen_16(_mm256_maskz_loadu_epi16(here, from + H));
        __m512 y = _mm512_load_ps(of->products + (i + r) * BLOCK + k);
        __m512 s = sigmoid(a), open = _mm512_mul_ps(a, s);
        __m512 slope = _mm512_fmadd_ps(open, _mm512_sub_ps(one, s), s);
        gate[r] = rounded(_mm512_mul_ps(_mm512_mul_ps(y, b), slope));
        up[r] = rounded(_mm512_mul_ps(y, open));
        hidden[r] = rounded(_mm512_mul_ps(open, b));
        bf16 *to = d_both + (i + r) * 2 * H + k;
        _mm256_store_si256((__m256i *)to, gate[r]);
        _mm256_store_si256((__m256i *)(to + H), up[r]);
      }
      int64_t at = i / 2 * BLOCK + k;
      _mm512_store_si512(of->gate + at, pair_up(gate[0], gate[1]));
      _mm512_store_si512(of->up + at, pair_up(up[0], up[1]));
      _mm512_store_si512(of->hidden + at, pair_up(hidden[0], hidden[1]));
    }
}

/* The gradients of x, and of the weights, (groups, 2 hidden, in) and (groups, out, hidden), if they
   are given, for groups first..last. Returns 1 where there is no memory. */
int backward(const Backward *of, int64_t first, int64_t last) {
  int64_t in = of->sizes.in, H = of->sizes.hidden, O = of->sizes.out, group = of->sizes.group;
  char *memory = aligned_alloc(64, 2 * H * (2 * in + O) + 2 * ROWS * (2 * H + 2 * O + in) +
                                       4 * ROWS * in + 10 * ROWS * BLOCK);
  if (!memory) return 1;
  char *room = memory;
  pair *weights = carve(&room, 4 * H * in), *down = carve(&room, 2 * O * H);
  bf16 *d_both = carve(&room, 4 * ROWS * H), *grad = carve(&room, 2 * ROWS * O);
  pair *x = carve(&room, 2 * ROWS * in), *woven = carve(&room, 2 * ROWS * O);
  float *d_x = carve(&room, 4 * ROWS * in), *products = carve(&room, 4 * ROWS * BLOCK);
  pair *gate = carve(&room, 2 * ROWS * BLOCK), *open = carve(&room, 2 * ROWS * BLOCK);
  Panel part = {products, gate, open, carve(&room, 2 * ROWS * BLOCK)};
  weave(of->weights, in, 2 * H, in, weights, PANEL(2 * H));
  weave(of->down, H, O, H, down, PANEL(O));
  for (int64_t n = first; n < last; n++)
    for (int64_t t = n * group; t < least((n + 1) * group, of->sizes.tokens); t += ROWS) {
      int64_t rows = least(ROWS, of->sizes.tokens - t), high = full(rows);
      int64_t add = t > n * group;
      take(of->grad + t * O, O, rows, O, grad);
      weave(grad, O, rows, O, woven, PANEL(ROWS));
      weave(of->x + t * in, in, rows, in, x, PANEL(ROWS));
      for (int64_t j = 0; j < H; j += BLOCK) {
        const pair *columns = down + j / BLOCK * PANEL(O);
        multiply((pair *)grad, O / 2, 1, columns, 0, products, BLOCK, high, BLOCK, O / 2, 0);
        unfold(of->both + t * 2 * H + j, rows, H, &part, d_both + j);
        if (!of->d_weights) continue;
        float *to = of->d_weights + (n * 2 * H + j) * in, *to_down = of->d_down + n * O * H + j;
        multiply(gate, 1, BLOCK, x, PANEL(ROWS), to, in, BLOCK, in, high / 2, add);
        multiply(open, 1, BLOCK, x, PANEL(ROWS), to + H * in, in, BLOCK, in, high / 2, add);
        for (int64_t o = 0; o < O; o += BLOCK)
          multiply(woven + o / BLOCK * PANEL(ROWS), 1, BLOCK, part.hidden, 0, to_down + o * H, H,
                   BLOCK, BLOCK, high / 2, add);
      }
      multiply((pair *)d_both, H, 1, weights, PANEL(2 * H), d_x, in, high, in, H, 0);
      memcpy(of->d_x + t * in, d_x, rows * in * sizeof *d_x);
    }
  free(memory);
  return 0;
}
#endif
