// Every exact divergence of two rows of logits in two passes, without a temporary of their size.
//
// The readable formulas stand in the Python files of this folder, and the tests hold this file
// to them.  As there, the difference of the logits is formed before a normaliser is taken off
// it, and a term of second order is never the difference of two terms of first order.  No flag
// that lets a compiler re-associate may be used: only the sums over tokens are reordered.

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef SOURCE
#define SOURCE ""
#endif
// the digest of the source that was compiled: row_sums.py refuses a library of another one
const char servanda_row_sums_source[] = SOURCE;

#define INLINE static inline __attribute__((always_inline))

// one build for every x86-64: the widest instructions are chosen when the library is loaded
#ifdef WIDEST  // the tests compile for each of them alone
#elif defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define WIDEST __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define WIDEST
#endif

// Log weights beyond this are left to the readable formulas: within it no product of a
// probability and a weight leaves the range of floats.
#define FARTHEST 100.0
// Logprobs are worked as if none were below: exp of it is 1e-304, which adds nothing.
#define LOWEST -700.0

// in the order of the columns of row_sums.py
enum { HIGH, LOW, SHIFT, LOG_Z, ENTROPY, TV, KL, KL_REVERSE, CHI2, LE_CAM, HELLINGER2, JS,
       ENTROPY_GAP, COLUMNS };

INLINE double of_bits(int64_t bits) {
  double x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

INLINE int64_t bits_of(double x) {
  int64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static const double LN2_HIGH = 6.93147180369123816490e-01;
static const double LN2_LOW = 1.90821492927058770002e-10;

// exp(x) = 2^k exp(r) with |r| <= log(2) / 2: gives exp(r) - 1, and 2^k.  |x| <= 700.
INLINE double reduced_expm1(double x, double *power) {
  const double to_integer = 6755399441055744.0;  // 1.5 * 2^52: the sum keeps the integer part
  double shifted = x * 1.4426950408889634 + to_integer;
  double k = shifted - to_integer;
  double r = (x - k * LN2_HIGH) - k * LN2_LOW;
  double p = 1. / 6227020800;  // the series to r^13 / 13!
  p = p * r + 1. / 479001600;
  p = p * r + 1. / 39916800;
  p = p * r + 1. / 3628800;
  p = p * r + 1. / 362880;
  p = p * r + 1. / 40320;
  p = p * r + 1. / 5040;
  p = p * r + 1. / 720;
  p = p * r + 1. / 120;
  p = p * r + 1. / 24;
  p = p * r + 1. / 6;
  p = p * r + 1. / 2;
  *power = of_bits((int64_t)(((uint64_t)bits_of(shifted) << 52) + 0x3FF0000000000000u));
  return r + r * r * p;
}

INLINE double fast_exp(double x) {
  double power, rest = reduced_expm1(x, &power);
  return power * rest + power;
}

INLINE double fast_expm1(double x) {
  double power, rest = reduced_expm1(x, &power);
  return power * rest + (power - 1);
}

// log(1 + u / 2), and u / (2 + u): of w = 1 + u these are log((1 + w) / 2) and tanh(log(w) / 2)
INLINE double fast_middle(double u, double *half) {
  double y = 1 + u / 2;
  uint64_t bits = (uint64_t)bits_of(y);
  // y = 2^k m, m from sqrt(1/2) to sqrt(2).  k + 1024 is worked without a sign and is made a
  // double by its bits: AVX2 neither shifts signed 64-bit integers nor converts them.
  uint64_t exponent = (bits - 0x3FE6A09E667F3BCD + (1024ull << 52)) >> 52;
  double k = of_bits((int64_t)(exponent | 0x4330000000000000u)) - (4503599627370496.0 + 1024);
  double m = of_bits((int64_t)(bits - ((exponent - 1024) << 52)));
  double down = of_bits((int64_t)((2047 - exponent) << 52));
  double f = (m - 1) + (u / 2 - (y - 1)) * down;  // what the sum 1 + u / 2 rounded off, too
  double inverse = 1 / ((2 + f) * (2 + u));
  double s = f * (2 + u) * inverse, z = s * s;
  *half = u * (2 + f) * inverse;
  double p = 2. / 21;  // log(1 + f) = 2 atanh(s), s = f / (2 + f)
  p = p * z + 2. / 19;
  p = p * z + 2. / 17;
  p = p * z + 2. / 15;
  p = p * z + 2. / 13;
  p = p * z + 2. / 11;
  p = p * z + 2. / 9;
  p = p * z + 2. / 7;
  p = p * z + 2. / 5;
  p = p * z + 2. / 3;
  double square = f * f / 2;
  return k * LN2_HIGH + (f - (square - (s * (square + p * z) + k * LN2_LOW)));
}

// A token to which neither side gives mass has weight 1 and no part in the drift.
INLINE double drift(double train, double infer, double neither) {
  return train == -INFINITY && infer == -INFINITY ? neither : train - infer;
}

INLINE double at_least(double x, double least) { return x < least ? least : x; }

typedef struct {
  double sum, more;  // of exp(infer - top), and of exp(infer - top) (exp(drift - centre) - 1)
  double high, low;  // of the drift
} Normaliser;

// First pass: infer's normaliser, what train's has more, and the drift's range.
#define NORMALISE(NAME, TYPE)                                                                  \
  WIDEST static void NAME(const TYPE *train, const TYPE *infer, ptrdiff_t vocabulary,          \
                          double top, double centre, Normaliser *out) {                        \
    double sum = 0, more = 0, high = -INFINITY, low = INFINITY;                                \
    _Pragma("omp simd reduction(+ : sum, more) reduction(max : high) reduction(min : low)")    \
    for (ptrdiff_t v = 0; v < vocabulary; v++) {                                               \
      double x = infer[v], d = drift(train[v], x, centre);                                     \
      high = high > d ? high : d;                                                              \
      low = low < d ? low : d;                                                                 \
      double q = fast_exp(at_least(x - top, LOWEST));                                          \
      sum += q;                                                                                \
      more += q * fast_expm1(d - centre);                                                      \
    }                                                                                          \
    *out = (Normaliser){sum, more, high, low};                                                 \
  }

// Second pass: of each token q, its log weight x = log(p / q) and u = p / q - 1.
#define REDUCE(NAME, TYPE)                                                                     \
  WIDEST static void NAME(const TYPE *train, const TYPE *infer, ptrdiff_t vocabulary,          \
                          double log_z, double shift, double *out) {                           \
    double tv = 0, kl = 0, reverse = 0, chi2 = 0, le_cam = 0, hellinger2 = 0, js = 0, gap = 0; \
    double entropy = 0;                                                                        \
    _Pragma("omp simd reduction(+ : tv, kl, reverse, chi2, le_cam, hellinger2, js, gap, entropy)") \
    for (ptrdiff_t v = 0; v < vocabulary; v++) {                                               \
      double logit = infer[v], x = drift(train[v], logit, shift) - shift;                      \
      double log_q = at_least(logit - log_z, LOWEST), q = fast_exp(log_q);                     \
      double root = fast_expm1(x / 2), u = root * (root + 2), half;                            \
      double middle = fast_middle(u, &half), qu = q * u;                                       \
      double back = (1 + u) * x - u; /* w log w - w + 1 */                                     \
      tv += fabs(qu);                                                                          \
      kl += q * (u - x);                                                                       \
      reverse += q * back;                                                                     \
      chi2 += qu * u;                                                                          \
      le_cam += qu * half;                                                                     \
      hellinger2 += q * root * root;                                                           \
      js += q * (back - 2 * ((1 + u / 2) * middle - u / 2));                                   \
      gap += qu * log_q + (q + qu) * x;                                                        \
      entropy -= q * log_q;                                                                    \
    }                                                                                          \
    out[ENTROPY] = entropy, out[TV] = tv / 2, out[KL] = kl, out[KL_REVERSE] = reverse;         \
    out[CHI2] = chi2, out[LE_CAM] = le_cam / 2, out[HELLINGER2] = hellinger2 / 2;              \
    out[JS] = js / 2, out[ENTROPY_GAP] = fabs(gap);                                            \
  }

// Rows whose weights are all within FARTHEST; the others keep plain[r] = 0.
//
// best: where each row of infer is largest, [rows]; that logit must be finite and no logit of
// either row NaN or +inf.  out: [rows, COLUMNS].
#define ROWS(TYPE)                                                                             \
  NORMALISE(normalise_##TYPE, TYPE)                                                            \
  REDUCE(reduce_##TYPE, TYPE)                                                                  \
  void servanda_rows_##TYPE(const TYPE *train, const TYPE *infer, ptrdiff_t rows,              \
                            ptrdiff_t vocabulary, const int64_t *best, double *out,            \
                            uint8_t *plain) {                                                  \
    for (ptrdiff_t r = 0; r < rows; r++, out += COLUMNS, train += vocabulary,                  \
                   infer += vocabulary) {                                                      \
      plain[r] = 0;                                                                            \
      double top = infer[best[r]], centre = train[best[r]] - top;                              \
      Normaliser first;                                                                        \
      if (centre == -INFINITY) continue;                                                       \
      normalise_##TYPE(train, infer, vocabulary, top, centre, &first);                         \
      if (!(first.high - centre <= FARTHEST && centre - first.low <= FARTHEST)) continue;      \
      plain[r] = 1;                                                                            \
      out[HIGH] = first.high, out[LOW] = first.low;                                            \
      out[SHIFT] = centre + log1p(first.more / first.sum);                                     \
      out[LOG_Z] = top + log(first.sum);                                                       \
      reduce_##TYPE(train, infer, vocabulary, out[LOG_Z], out[SHIFT], out);                    \
    }                                                                                          \
  }

ROWS(float)
ROWS(double)
