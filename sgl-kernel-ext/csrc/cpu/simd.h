// Sixteen-lane vectors on every instruction set, through the compiler's vector extensions.
//
// Included once per instruction set, inside a namespace of its own: see isa.inc. Nothing here may come from the standard
// library's templates, whose instances the linker would share between instruction sets.

constexpr int kLanes = 16;

typedef float Vf __attribute__((vector_size(64)));
typedef int32_t Vi __attribute__((vector_size(64)));
typedef uint32_t Vu __attribute__((vector_size(64)));
typedef uint16_t Vu16 __attribute__((vector_size(32)));
typedef uint8_t Vu8 __attribute__((vector_size(16)));

#define OASIS_INLINE static inline __attribute__((always_inline))

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

OASIS_INLINE Vi lane_index() { return Vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// The element types. bfloat16 and float16 are converted by hand: compilers before GCC 13 lack one type or the other.
struct Float32 {
  using Element = float;
  OASIS_INLINE Vf read(const Element* from) { return load<Vf>(from); }
  OASIS_INLINE void write(Element* to, Vf v) { store(to, v); }
};

struct BFloat16 {
  using Element = uint16_t;
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
  OASIS_INLINE Vf read(const Element* from) {
    const Vu bits = __builtin_convertvector(load<Vu16>(from), Vu);
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

template <int kWidth, typename V>
OASIS_INLINE V swap_halves(V v) {
  const Vi index = lane_index() ^ kWidth;
  return __builtin_shuffle(v, index);
}

template <typename V>
OASIS_INLINE auto reduce_sum(V v) {
  v += swap_halves<8>(v);
  v += swap_halves<4>(v);
  v += swap_halves<2>(v);
  v += swap_halves<1>(v);
  return v[0];
}

OASIS_INLINE float reduce_max(Vf v) {
  v = maximum(v, swap_halves<8>(v));
  v = maximum(v, swap_halves<4>(v));
  v = maximum(v, swap_halves<2>(v));
  v = maximum(v, swap_halves<1>(v));
  return v[0];
}

// Exchanges the off-diagonal kWidth x kWidth quarters of every 2 kWidth x 2 kWidth square.
template <int kWidth>
OASIS_INLINE void transpose_stage(Vu (&m)[16]) {
  const Vi lane = lane_index();
  const Vi upper = (lane & kWidth) != 0;
  // Lanes of (a, b), b's being 16 to 31.
  const Vi low = (upper & (lane - kWidth + 16)) | (~upper & lane);
  const Vi high = (upper & (lane + 16)) | (~upper & (lane + kWidth));
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if (i & kWidth) continue;
    const Vu a = m[i], b = m[i + kWidth];
    m[i] = __builtin_shuffle(a, b, low);
    m[i + kWidth] = __builtin_shuffle(a, b, high);
  }
}

OASIS_INLINE void transpose(Vu (&m)[16]) {
  transpose_stage<8>(m);
  transpose_stage<4>(m);
  transpose_stage<2>(m);
  transpose_stage<1>(m);
}

// Sums of sixteen vectors, in their order.
OASIS_INLINE Vf reduce_sums(const Vf (&v)[16]) {
  Vu m[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) m[i] = (Vu)v[i];
  transpose(m);
  Vf sum = (Vf)m[0];
#pragma GCC unroll 16
  for (int i = 1; i < 16; ++i) sum += (Vf)m[i];
  return sum;
}
