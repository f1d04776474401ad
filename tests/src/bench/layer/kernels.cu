// Random bits of an index, which the host works out likewise: e4m3 or BF16 from 0.5 to 2 with either sign, or
// f32 from 0.5 to 1, of so many bytes each.
extern "C" __global__ void fill(void* to, unsigned long long first, unsigned long long count,
                                unsigned long long bytes) {
    for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        unsigned long long bits = (first + i) * 0x9e3779b97f4a7c15;
        bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9;
        bits = (bits ^ bits >> 27) * 0x94d049bb133111eb;
        bits ^= bits >> 31;
        if (bytes == 1) ((unsigned char*)to)[i] = 0x30 | (bits & 0x8f);
        if (bytes == 2) ((unsigned short*)to)[i] = 0x3f00 | (bits & 0x80ff);
        if (bytes == 4) ((unsigned int*)to)[i] = 0x3f000000 | (bits & 0x7fffff);
    }
}

// Scales of rows, [groups, capacity], as cuBLASLt takes them: [groups, rows] of each expert, without gaps.
extern "C" __global__ void pack(const float* scales, const unsigned int* offsets, float* packed,
                                long long capacity, long long groups) {
    long long expert = blockIdx.x / groups, group = blockIdx.x % groups;
    long long first = offsets[expert], count = offsets[expert + 1] - first;
    for (long long row = threadIdx.x; row < count; row += blockDim.x) {
        packed[first * groups + group * count + row] = scales[group * capacity + first + row];
    }
}

#if __CUDA_ARCH__ >= 890
// BF16 as e4m3 codes, 128 values a scale, by dispatch's rule: scale = max(amax, 1e-4) / 448, code = x / scale.
// 16 threads a scale, 8 values a thread.
extern "C" __global__ void encode(const uint4* x, uint2* codes, float* scales, unsigned long long blocks) {
    unsigned long long at = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x, block = at / 16;
    if (block >= blocks) return;
    uint4 loaded = x[at];
    unsigned int words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    float values[8], amax = 1e-4f;
    for (int i = 0; i < 8; i++) {
        values[i] = __int_as_float(i % 2 ? words[i / 2] & 0xffff0000 : words[i / 2] << 16);
        amax = fmaxf(amax, fabsf(values[i]));
    }
    // Of the last warp, only half may be left.
    unsigned int mask = 0xffffu << (threadIdx.x & 16);
    for (int distance = 8; distance > 0; distance /= 2) {
        amax = fmaxf(amax, __shfl_xor_sync(mask, amax, distance));
    }
    float scale = amax / 448.0f;
    unsigned short pairs[4];
    for (int i = 0; i < 4; i++) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
            : "=h"(pairs[i]) : "f"(values[2 * i + 1] / scale), "f"(values[2 * i] / scale));
    }
    codes[at] = make_uint2(pairs[0] | (unsigned int)pairs[1] << 16, pairs[2] | (unsigned int)pairs[3] << 16);
    if (at % 16 == 0) scales[block] = scale;
}
#endif
