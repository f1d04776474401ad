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
