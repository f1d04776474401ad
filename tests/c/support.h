// Shared by the parts of the C test program: checks, and the ranks of this process.
#ifndef FERRY_TEST_SUPPORT_H
#define FERRY_TEST_SUPPORT_H

#include <ferry.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HIDDEN = 128, EXPERTS = 8, TOP_K = 2, TOKENS = 6, MOST_RANKS = 8 };

// Ends the program unless a call returns `status`, with a text that begins with its name if it fails.
#define EXPECT(status, call) expect((status), (call), #call, __FILE__, __LINE__)
#define OK(call) EXPECT(FERRY_OK, call)
// Ends the program unless a condition holds.
#define HOLDS(condition) holds((condition) ? 1 : 0, #condition, __FILE__, __LINE__)

static inline void expect(ferry_status wanted, ferry_status given, const char *call, const char *file,
                          int line) {
    int is_named = strncmp(ferry_last_error(), call, strcspn(call, "(")) == 0;
    if (given == wanted && (given == FERRY_OK || is_named)) return;
    fprintf(stderr, "%s:%d: %s\n  returned %s, wanted %d\n  %s\n", file, line, call,
            ferry_status_string(given), wanted, given == FERRY_OK ? "" : ferry_last_error());
    exit(1);
}

// Ends the program unless a call is refused, with a text that contains `words`.
#define REFUSED(status, words, call) (EXPECT((status), call), says((words), __FILE__, __LINE__))

static inline void says(const char *words, const char *file, int line) {
    if (strstr(ferry_last_error(), words) != NULL) return;
    fprintf(stderr, "%s:%d: not said: %s\n  but: %s\n", file, line, words, ferry_last_error());
    exit(1);
}

static inline void holds(int condition, const char *text, const char *file, int line) {
    if (condition) return;
    fprintf(stderr, "%s:%d: does not hold: %s\n", file, line, text);
    exit(1);
}

// A rank of this process.
typedef struct rank_state {
    uint32_t rank;
    ferry_device *device;
    ferry_communicator *communicator;
    void *stream;
} rank_state;

// The ranks of this process, with one communicator.
typedef struct team {
    ferry_group *group;
    ferry_plan *plan;
    uint32_t ranks;
    size_t count;
    rank_state local[MOST_RANKS];
} team;

// Makes a team over a group, with a plan of its own. round.c
team make_team(ferry_group *group, const ferry_config *config);
void close_team(team *of);
// The configuration of every test here. round.c
ferry_config small_config(void);

// Allocates device memory, to be freed with release_memory. round.c
uint64_t device_memory(const rank_state *rank, const void *from, size_t bytes);
void release_memory(const rank_state *rank, uint64_t *addresses, size_t count);

// Converts a number that is exact in BF16, and back.
static inline uint16_t bf16_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static inline float of_bf16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

// Elements of token `token` of `rank`: small integers, so that every sum here is exact in BF16.
static inline float element_of(uint32_t rank, int token, int column) {
    return (float)(((int)rank * 5 + token * 3 + column) % 16);
}

// Distinct experts of a token, and their weights.
static inline int32_t expert_of(uint32_t rank, int token, int slot) {
    return ((int32_t)rank + token * 3 + slot * 5) % EXPERTS;
}

static inline float weight_of(int slot) { return slot == 0 ? 0.5f : 0.25f; }

// A rank's input of TOKENS tokens.
typedef struct round_input {
    ferry_dispatch_input input;
    uint64_t memory[3];
} round_input;
round_input make_input(const rank_state *rank, int bad_token);

// The parts. bad_input.c, encoded.c, formats.c, modes.c, options.c, queries.c, rows.c
void test_bad_input(ferry_group *group, int simulated);
void test_options(ferry_group *group);
void test_formats(ferry_group *group);
void test_silu(ferry_group *group);
void test_graph(ferry_group *group, int simulated);
void test_modes(ferry_group *group);
void test_together(ferry_group *group);
void test_plan(ferry_group *group);
void test_pointers_of_device(ferry_group *group, int simulated);
void test_kernels(void);
void test_rows(ferry_group *group);
void test_encoded(ferry_group *group);

#endif
