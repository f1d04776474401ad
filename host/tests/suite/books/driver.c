/* A driver that runs nothing and keeps books: of modules, launches, captures and memory. It ends the program
 * where a kernel is launched, or is still at work, whose module was unloaded. One thread uses it at a time. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int loaded;
} module;
typedef struct {
    module *of;
} function;
typedef struct {
    function *of[64];
    int count;
} launches;
typedef struct {
    unsigned long long capture; /* 0: not captured */
    launches captured, at_work;
} stream;

/* What a test asks for. */
unsigned long long books_modules, books_allocations, books_questions;

static stream default_stream, *streams[64] = {&default_stream};
static int stream_count = 1;
static unsigned long long captures;
static _Thread_local void *current;

static void require(int holds, const char *what) {
    if (!holds) {
        fprintf(stderr, "the books: %s\n", what);
        abort();
    }
}

static void add(launches *to, const launches *from) {
    for (int i = 0; i < from->count; i++) {
        require(to->count < 64, "there is room for 64 launches");
        to->of[to->count++] = from->of[i];
    }
}

static int enqueue(stream *on, const launches *all) {
    on = on ? on : &default_stream;
    for (int i = 0; i < all->count; i++)
        require(all->of[i]->of->loaded, "a kernel is launched whose module was unloaded");
    add(on->capture ? &on->captured : &on->at_work, all);
    return 0;
}

int cuInit(unsigned flags) { return 0; }
int cuGetProcAddress(const char *name, void **at, int version, unsigned long long flags) { return 500; }
int cuGetErrorName(int code, const char **name) { return *name = "AN_ERROR", 0; }
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuDeviceGetExecAffinitySupport(int *is_supported, int kind, int device) { return *is_supported = 0, 0; }
int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetName(char *name, int bytes, int device) { return snprintf(name, bytes, "books"), 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    /* Multiprocessors; compute capability 9.0. */
    return *value = attribute == 16 ? 132 : attribute == 75 ? 9 : 0, 0;
}
int cuDeviceGetUuid(char *uuid, int device) { return memset(uuid, 7, 16), 0; }
int cuDeviceGetUuid_v2(char *uuid, int device) { return memset(uuid, 7, 16), 0; }
int cuDeviceCanAccessPeer(int *can, int from, int to) { return *can = 1, 0; }

int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = &default_stream, 0; }
int cuCtxGetCurrent(void **context) { return *context = current, 0; }
int cuCtxGetDevice(int *device) { return *device = 0, 0; }
int cuCtxPushCurrent_v2(void *context) { return current = context, 0; }
int cuCtxPopCurrent_v2(void **context) { return *context = current, current = NULL, 0; }
int cuCtxEnablePeerAccess(void *peer, unsigned flags) { return 0; }
int cuCtxSynchronize(void) {
    for (int i = 0; i < stream_count; i++)
        streams[i]->at_work.count = 0;
    return 0;
}

int cuModuleLoadDataEx(module **out, const char *image, unsigned options, int *names, void **values) {
    *out = calloc(1, sizeof(module));
    (*out)->loaded = 1;
    books_modules++;
    return 0;
}
int cuModuleUnload(module *gone) {
    gone->loaded = 0;
    books_modules--;
    for (int i = 0; i < stream_count; i++)
        for (int j = 0; j < streams[i]->at_work.count; j++)
            require(streams[i]->at_work.of[j]->of != gone, "a module is unloaded whose kernel is at work");
    return 0;
}
int cuModuleGetFunction(function **out, module *of, const char *name) {
    *out = calloc(1, sizeof(function));
    (*out)->of = of;
    return 0;
}
int cuModuleGetGlobal_v2(void **at, size_t *bytes, module *of, const char *name) { return 500; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, function *of, int threads, size_t bytes) {
    return *blocks = 1, 0;
}
int cuFuncSetAttribute(function *of, int attribute, int value) { return 0; }

struct config {
    unsigned grid[3], block[3], shared_bytes;
    stream *on;
};
int cuLaunchKernelEx(const struct config *config, function *of, void **parameters, void **extra) {
    launches one = {{of}, 1};
    return enqueue(config->on, &one);
}

int cuPointerGetAttribute(int *value, int attribute, unsigned long long at) { return *value = 0, 0; }
int cuMemAlloc_v2(void **at, size_t bytes) {
    books_allocations++;
    return *at = calloc(1, bytes), 0;
}
int cuMemFree_v2(void *at) {
    books_allocations--;
    return free(at), 0;
}
int cuMemGetInfo_v2(size_t *free, size_t *total) { return *free = *total = 1ull << 36, 0; }
int cuMemGetAddressRange_v2(unsigned long long *base, size_t *bytes, unsigned long long at) { return 1; }
int cuMemHostAlloc(void **at, size_t bytes, unsigned flags) { return cuMemAlloc_v2(at, bytes); }
int cuMemHostGetDevicePointer_v2(void **at, void *host, unsigned flags) { return *at = host, 0; }
int cuMemFreeHost(void *at) { return cuMemFree_v2(at); }
int cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t bytes, stream *on) {
    return memcpy(to, from, bytes), 0;
}
int cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t bytes, stream *on) {
    return memcpy(to, from, bytes), 0;
}
int cuMemsetD8Async(void *at, unsigned char value, size_t bytes, stream *on) {
    return memset(at, value, bytes), 0;
}

int cuStreamCreate(stream **out, unsigned flags) {
    require(stream_count < 64, "there is room for 64 streams");
    return *out = streams[stream_count++] = calloc(1, sizeof(stream)), 0;
}
int cuStreamDestroy_v2(stream *gone) { return 0; }
int cuStreamSynchronize(stream *on) { return (on ? on : &default_stream)->at_work.count = 0, 0; }
int cuStreamGetCtx(stream *on, void **context) { return *context = &default_stream, 0; }
int cuStreamBeginCapture_v2(stream *on, int mode) {
    on->captured.count = 0;
    return on->capture = ++captures, 0;
}
int cuStreamGetCaptureInfo_v2(stream *on, unsigned *status, unsigned long long *id, void **graph,
                              const void **dependencies, size_t *count) {
    books_questions++;
    return *id = on->capture, *status = on->capture != 0, 0;
}
int cuStreamEndCapture(stream *on, launches **graph) {
    *graph = calloc(1, sizeof(launches));
    **graph = on->captured;
    return on->capture = 0, 0;
}
int cuGraphInstantiateWithFlags(launches **out, launches *graph, unsigned long long flags) {
    *out = calloc(1, sizeof(launches));
    return **out = *graph, 0;
}
int cuGraphLaunch(launches *graph, stream *on) {
    on = on ? on : &default_stream;
    return on->capture ? 900 : enqueue(on, graph); /* CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED */
}
int cuGraphDestroy(launches *graph) { return free(graph), 0; }
int cuGraphExecDestroy(launches *graph) { return free(graph), 0; }

int cuEventCreate(void **event, unsigned flags) { return *event = &default_stream, 0; }
int cuEventRecord(void *event, stream *on) { return 0; }
int cuEventSynchronize(void *event) { return 0; }
int cuEventElapsedTime(float *milliseconds, void *start, void *end) { return *milliseconds = 1, 0; }
int cuEventDestroy_v2(void *event) { return 0; }

int cuIpcGetMemHandle(void *handle, unsigned long long at) { return 1; }
int cuIpcOpenMemHandle_v2(unsigned long long *at, ...) { return 1; }
int cuIpcCloseMemHandle(unsigned long long at) { return 1; }
