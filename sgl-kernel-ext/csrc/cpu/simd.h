// Vectors as wide as the instruction set's registers, through the compiler's vector extensions: OASIS_VECTOR_BYTES says how
// wide. Never wider: the compiler keeps a vector that no register holds in memory, and compares, selects and shuffles it
// lane by lane, at a twentieth of the speed.
//
// Included once per instruction set, inside a namespace of its own: see isa.inc. Nothing here may come from the standard
// library's templates, whose instances the linker would share between instruction sets.

constexpr int kLanes = OASIS_VECTOR_BYTES / 4;  // 16, 8 or 4: head sizes are multiples of each

typedef float Vf __attribute__((vector_size(4 * kLanes)));
typedef int32_t Vi __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Vu __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Vu16 __attribute__((vector_size(2 * kLanes)));
typedef uint8_t Vu8 __attribute__((vector_size(kLanes)));

#define OASIS_ALWAYS_INLINE __attribute__((always_inline))
#define OASIS_INLINE static inline OASIS_ALWAYS_INLINE

template <typename V>
OASIS_INLINE V load(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}

template <typename V>
OASIS_INLINE void store(void* to, V v) {
  __builtin_memcpy(to, &v, sizeof(V));
}

OASIS_INLINE Vf splat(float x) { return Vf{} + x; }
OASIS_INLINE Vi splat_int(int32_t x) { return Vi{} + x; }
OASIS_INLINE Vf select(Vi mask, Vf yes, Vf no) { return mask ? yes : no; }
OASIS_INLINE Vf maximum(Vf a, Vf b) { return select(a > b, a, b); }
OASIS_INLINE Vf minimum(Vf a, Vf b) { return select(a < b, a, b); }
OASIS_INLINE Vf absolute(Vf a) { return (Vf)((Vu)a & 0x7fffffffu); }

OASIS_INLINE Vi lane_index() {
#if OASIS_VECTOR_BYTES == 64
  return Vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif OASIS_VECTOR_BYTES == 32
  return Vi{0, 1, 2, 3, 4, 5, 6, 7};
#else
  return Vi{0, 1, 2, 3};
#endif
}

// The element types. bfloat16 and float16 are converted by hand: compilers before GCC 13 lack one type or the other.
// `read_two` reads 2 kLanes elements with no shuffle: of 16 bits, the even ones and the odd ones, where kAlternate says so.
// kFewRows: up to so many query vectors, converting each key again for every four of them takes less time than packing it.
struct Float32 {
  using Element = float;
  static constexpr int kFewRows = 32;
  static constexpr bool kAlternate = false;
  OASIS_INLINE void read_two(const Element* from, Vf& first, Vf& second) {
    first = load<Vf>(from);
    second = load<Vf>(from + kLanes);
  }
  OASIS_INLINE Vf read(const Element* from) { return load<Vf>(from); }
  OASIS_INLINE void write(Element* to, Vf v) { store(to, v); }
};

struct BFloat16 {
  using Element = uint16_t;
  static constexpr int kFewRows = 32;
  static constexpr bool kAlternate = true;
  OASIS_INLINE void read_two(const Element* from, Vf& even, Vf& odd) {
    const Vu pairs = load<Vu>(from);
    even = (Vf)(pairs << 16);
    odd = (Vf)(pairs & 0xffff0000u);
  }
  OASIS_INLINE Vf read(const Element* from) { return (Vf)(__builtin_convertvector(load<Vu16>(from), Vu) << 16); }
  OASIS_INLINE void write(Element* to, Vf v) {
    const Vu bits = (Vu)v;
    const Vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // half to even
    const Vu quiet_nan = (bits >> 16) | 0x40u;
    store(to, __builtin_convertvector(v == v ? rounded : quiet_nan, Vu16));
  }
};

struct Float16 {
  using Element = uint16_t;
  static constexpr int kFewRows = 8;
  static constexpr bool kAlternate = true;
  OASIS_INLINE Vf read(const Element* from) { return widen(__builtin_convertvector(load<Vu16>(from), Vu)); }
  OASIS_INLINE void read_two(const Element* from, Vf& even, Vf& odd) {
    const Vu pairs = load<Vu>(from);
    even = widen(pairs & 0xffffu);
    odd = widen(pairs >> 16);
  }
  OASIS_INLINE Vf widen(Vu bits) {
    const Vu magnitude = (bits & 0x7fffu) << 13;
    // The multiplication moves the exponent's bias and gets subnormals right; infinities and NaNs need their exponent.
    const Vu scaled = (Vu)((Vf)magnitude * 0x1p112f);
    const Vu special = (Vu)(magnitude >= (0x7c00u << 13)) & 0x7f800000u;
    return (Vf)(scaled | special | ((bits & 0x8000u) << 16));
  }
  OASIS_INLINE void write(Element* to, Vf v) {
    const Vu sign = ((Vu)v >> 16) & 0x8000u;
    const Vu magnitude = (Vu)v & 0x7fffffffu;
    // Normal results: the mantissa is rounded to 10 bits, half to even. Below 2^-14 the sum with 0.5 does the rounding.
    const Vu normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const Vu subnormal = (Vu)((Vf)magnitude + 0.5f) - 0x3f000000u;
    Vu bits = magnitude < 0x38800000u ? subnormal : normal;
    bits = magnitude >= 0x477ff000u ? Vu{} + 0x7c00u : bits;
    bits = magnitude > 0x7f800000u ? Vu{} + 0x7e00u : bits;
    store(to, __builtin_convertvector(bits | sign, Vu16));
  }
};

// exp(x) for x <= 0, relative error below 2e-7; what would be subnormal is 0.
OASIS_INLINE Vf exponential(Vf x) {
  const Vf shifted = x * 1.44269504088896341f + 12582912.0f;  // rounds to the nearest integer, in the low bits
  const Vf n = shifted - 12582912.0f;
  const Vf r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Vi power = ((Vi)shifted - 0x4b400000 + 127) << 23;
  return select(x < -87.0f, splat(0.0f), p * (Vf)power);  // NaN stays NaN
}

// Neighbouring groups of kWidth lanes in each other's place.
template <int kWidth, typename V>
OASIS_INLINE V swap_groups(V v) {
  return __builtin_shuffle(v, lane_index() ^ kWidth);
}

template <int kWidth = kLanes / 2, typename V>
OASIS_INLINE auto reduce_sum(V v) {
  v += swap_groups<kWidth>(v);
  if constexpr (kWidth > 1)
    return reduce_sum<kWidth / 2>(v);
  else
    return v[0];
}

template <int kWidth = kLanes / 2>
OASIS_INLINE float reduce_max(Vf v) {
  v = maximum(v, swap_groups<kWidth>(v));
  if constexpr (kWidth > 1)
    return reduce_max<kWidth / 2>(v);
  else
    return v[0];
}

// What follows works on quarters, groups of four lanes: every instruction set interleaves two vectors by quarters in one
// instruction. Of each quarter: (a0 b0 a1 b1) or (a2 b2 a3 b3), then (a0 a1 b0 b1) or (a2 a3 b2 b3).
template <bool kHigh, typename V>
OASIS_INLINE V interleave(V a, V b) {
  const Vi lane = lane_index();
  return __builtin_shuffle(a, b, (lane & ~3) + ((lane & 1) * kLanes + ((lane & 2) >> 1)) + (kHigh ? 2 : 0));
}
template <bool kHigh, typename V>
OASIS_INLINE V interleave_pairs(V a, V b) {
  const Vi lane = lane_index();
  return __builtin_shuffle(a, b, (lane & ~3) + (((lane & 2) >> 1) * kLanes + (lane & 1)) + (kHigh ? 2 : 0));
}

// Exchanges the off-diagonal kWidth x kWidth blocks of every 2 kWidth x 2 kWidth square, down to blocks of four.
template <int kWidth>
OASIS_INLINE void transpose_blocks(Vu (&m)[kLanes]) {
  if constexpr (kWidth >= 4) {
    const Vi lane = lane_index();
    const Vi upper = (lane & kWidth) != 0;
    // Lanes of (a, b), b's being kLanes and more.
    const Vi low = (upper & (lane - kWidth + kLanes)) | (~upper & lane);
    const Vi high = (upper & (lane + kLanes)) | (~upper & (lane + kWidth));
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i & kWidth) continue;
      const Vu a = m[i], b = m[i + kWidth];
      m[i] = __builtin_shuffle(a, b, low);
      m[i + kWidth] = __builtin_shuffle(a, b, high);
    }
    transpose_blocks<kWidth / 2>(m);
  }
}

OASIS_INLINE void transpose(Vu (&m)[kLanes]) {
  transpose_blocks<kLanes / 2>(m);
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 4) {
    const Vu a = interleave<false>(m[i], m[i + 1]), b = interleave<false>(m[i + 2], m[i + 3]);
    const Vu c = interleave<true>(m[i], m[i + 1]), d = interleave<true>(m[i + 2], m[i + 3]);
    m[i] = interleave_pairs<false>(a, b);
    m[i + 1] = interleave_pairs<true>(a, b);
    m[i + 2] = interleave_pairs<false>(c, d);
    m[i + 3] = interleave_pairs<true>(c, d);
  }
}

// Sums of kLanes vectors, in their order.
OASIS_INLINE Vf reduce_sums(const Vf (&v)[kLanes]) {
  Vu m[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) m[i] = (Vu)v[i];
  transpose(m);
  Vf sum = (Vf)m[0];
#pragma GCC unroll 16
  for (int i = 1; i < kLanes; ++i) sum += (Vf)m[i];
  return sum;
}

template <int kWidth = kLanes / 2>
OASIS_INLINE Vf add_quarters(Vf v) {
  if constexpr (kWidth >= 4)
    return add_quarters<kWidth / 2>(v + swap_groups<kWidth>(v));
  else
    return v;
}

// Sums of four vectors, in the first four lanes.
OASIS_INLINE Vf reduce_four(Vf a, Vf b, Vf c, Vf d) {
  const Vf ab = interleave<false>(a, b) + interleave<true>(a, b);
  const Vf cd = interleave<false>(c, d) + interleave<true>(c, d);
  return add_quarters(interleave_pairs<false>(ab, cd) + interleave_pairs<true>(ab, cd));
}

// The inner loops sum into tiles of rows times vectors that stay in registers: 32 of them, or 16.
#if OASIS_VECTOR_BYTES == 64 || defined(__aarch64__)
constexpr bool kWideTile = true;
constexpr int kTileRows = 6, kTileVectors = 4;
#elif OASIS_VECTOR_BYTES == 32
constexpr bool kWideTile = false;
constexpr int kTileRows = 6, kTileVectors = 2;
#else
constexpr bool kWideTile = false;
constexpr int kTileRows = 3, kTileVectors = 4;  // no instruction loads a number into all lanes: fewer rows
#endif

template <int kCount>
struct Rows {
  static constexpr int kRows = kCount;
};

// Calls f(Rows<n>, first row) for blocks of kMost rows, and for the rest at once.
template <int kMost, typename F>
OASIS_INLINE void by_rows(int64_t rows, const F& f, int64_t first = 0) {
  for (; first + kMost <= rows; first += kMost) f(Rows<kMost>{}, first);
  if constexpr (kMost > 1) by_rows<kMost - 1>(rows, f, first);
}
