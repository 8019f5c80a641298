/* A libnccl for the tests: ranks are threads of one process, devices are host memory.

   Calls return at once, as on a stream; an operation is carried out when the last rank it needs has
   come. What was called stands in a log. The functions fake_* are for the tests. */
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifndef FAKE_VERSION
#define FAKE_VERSION 22803
#endif

enum { SUCCESS = 0, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };
enum { MAX_RANKS = 16, MAX_STREAMS = 4096, MAX_OPS = 64, KEPT = 256 };

typedef struct Clique Clique;
typedef struct Comm {
  Clique *clique;
  int rank, size, device, blocking, error, aborted, finalized, ops;
  long calls;
  double factors[MAX_OPS];
} Comm;

typedef struct Op {
  const char *kind;
  Comm *comm;
  const void *send;
  void *recv;
  size_t count;
  int type, op, root, done;
  void *stream;
  struct Op *next;
  struct Op *after; /* on the same stream */
} Op;

typedef struct Slot { /* a collective: a call of every rank */
  long number;
  int arrived;
  Op *ops[MAX_RANKS];
  struct Slot *next;
} Slot;

struct Clique {
  char id[128];
  int size, arrived, splits;
  Comm *comms[MAX_RANKS];
  int colors[MAX_RANKS], keys[MAX_RANKS];
  Comm **out[MAX_RANKS];
  Slot *slots;
  Op *messages;
  struct Clique *next;
};

typedef struct { size_t size; unsigned magic, version; int blocking, cga, min_ctas, max_ctas; const char *net; int split_share; } Config;
typedef struct { char bytes[128]; } UniqueId;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Clique *cliques;
static char log_text[1 << 16];
static size_t log_used;
static char last_error[256];
static int next_result, stalled, ids;
static struct { void *stream; long given, finished; Op *first, *last; double ended[KEPT]; } streams[MAX_STREAMS];
static int num_streams;
static __thread int device, depth;
static __thread Op *group_first;

static void note(const char *text) {
  size_t length = strlen(text);
  if (log_used + length + 2 > sizeof log_text) return;
  memcpy(log_text + log_used, text, length);
  log_used += length;
  log_text[log_used++] = '\n';
  log_text[log_used] = 0;
}

static int place_of(void *stream) {
  for (int i = 0; i < num_streams; ++i)
    if (streams[i].stream == stream) return i;
  if (num_streams == MAX_STREAMS) abort();
  streams[num_streams].stream = stream;
  return num_streams++;
}

static size_t size_of(int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return sizes[type];
}

static void finish(Op *op) {
  int place = place_of(op->stream);
  op->done = 1;
  for (Op *first = streams[place].first; first && first->done; first = first->after) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    streams[place].first = first->after;
    streams[place].finished++; /* in their order */
    streams[place].ended[streams[place].finished % KEPT] = now.tv_sec + 1e-9 * now.tv_nsec;
  }
  pthread_cond_broadcast(&changed);
}

/* Reductions --------------------------------------------------------------------------------- */

/* An element of float16, bfloat16, or float8 (e4m3fn, e5m2), whose numbers are those of NCCL's types. */
static float load(const void *in, size_t i, int type) {
  uint16_t h = type < 10 ? ((const uint16_t *)in)[i] : (uint16_t)(((const uint8_t *)in)[i] << 8);
  if (type == 9) {
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
  }
  if (type == 10) {
    int exponent = h >> 11 & 15, mantissa = h >> 8 & 7;
    float f = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
    if (exponent == 15 && mantissa == 7) f = NAN;
    return h >> 15 ? -f : f;
  }
  _Float16 x;
  memcpy(&x, &h, 2); /* float8 of type e5m2 is its upper half */
  return (float)x;
}

static void store(void *out, size_t i, int type, float f) {
  if (type >= 10) { /* the next of all */
    uint8_t best = 0;
    for (int byte = 0; byte < 256; ++byte) {
      uint8_t candidate = (uint8_t)byte;
      if (fabsf(load(&candidate, 0, type) - f) < fabsf(load(&best, 0, type) - f)) best = candidate;
    }
    ((uint8_t *)out)[i] = best;
    return;
  }
  uint16_t h;
  if (type == 9) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    bits += 0x7fff + ((bits >> 16) & 1);
    h = (uint16_t)(bits >> 16);
  } else {
    _Float16 x = (_Float16)f;
    memcpy(&h, &x, 2);
  }
  ((uint16_t *)out)[i] = h;
}

#define REDUCE(T)                                                                   \
  for (size_t i = 0; i < count; ++i) {                                              \
    T total = ((const T *)in[0])[begin + i];                                        \
    if (op > 4) total = (T)(total * factors[0]);                                    \
    for (int r = 1; r < size; ++r) {                                                \
      T x = ((const T *)in[r])[begin + i];                                          \
      if (op > 4) x = (T)(x * factors[r]);                                          \
      if (op == 0 || op >= 4) total += x;                                           \
      if (op == 1) total *= x;                                                      \
      if (op == 2 && x > total) total = x;                                          \
      if (op == 3 && x < total) total = x;                                          \
    }                                                                               \
    if (op == 4) total /= (T)size;                                                  \
    ((T *)out)[i] = total;                                                          \
  }                                                                                 \
  break;

static void combine(const void **in, void *out, int size, size_t begin, size_t count, int type, int op, const double *factors) {
  switch (type) {
    case 0: REDUCE(int8_t)
    case 1: REDUCE(uint8_t)
    case 2: REDUCE(int32_t)
    case 3: REDUCE(uint32_t)
    case 4: REDUCE(int64_t)
    case 5: REDUCE(uint64_t)
    case 7: REDUCE(float)
    case 8: REDUCE(double)
    default:
      for (size_t i = 0; i < count; ++i) {
        float total = 0;
        for (int r = 0; r < size; ++r) {
          float x = load(in[r], begin + i, type);
          if (op > 4) x *= (float)factors[r];
          if (r == 0) total = x;
          else if (op == 1) total *= x;
          else if (op == 2) total = x > total ? x : total;
          else if (op == 3) total = x < total ? x : total;
          else total += x;
        }
        store(out, i, type, op == 4 ? total / size : total);
      }
  }
}

/* Every rank's input is read before anything is written: ranks may work in place. */
static void run(Slot *slot, int size) {
  Op *first = slot->ops[0];
  const char *kind = first->kind;
  size_t item = size_of(first->type), bytes = first->count * item;
  int all = !strcmp(kind, "AllReduce"), parts = !strcmp(kind, "ReduceScatter");
  int to_all = !strcmp(kind, "AlltoAll"), scatter = !strcmp(kind, "Scatter");
  size_t length = bytes * (parts || to_all || scatter ? size : 1);
  void *copies[MAX_RANKS];
  const void *in[MAX_RANKS];
  double factors[MAX_RANKS] = {0};
  for (int r = 0; r < size; ++r) {
    Op *op = slot->ops[r];
    copies[r] = NULL;
    int reads = !(!strcmp(kind, "Broadcast") || scatter) || r == first->root;
    if (reads) memcpy(copies[r] = malloc(length ? length : 1), op->send, length);
    in[r] = copies[r];
    if (op->op > 4) factors[r] = op->comm->factors[op->op - 5];
  }
  for (int r = 0; r < size; ++r) {
    char *out = slot->ops[r]->recv;
    if (all || parts || (!strcmp(kind, "Reduce") && r == first->root))
      combine(in, out, size, parts ? r * first->count : 0, first->count, first->type, first->op, factors);
    if (!strcmp(kind, "Broadcast")) memcpy(out, in[first->root], bytes);
    if (scatter) memcpy(out, (const char *)in[first->root] + r * bytes, bytes);
    if (!strcmp(kind, "AllGather") || (!strcmp(kind, "Gather") && r == first->root))
      for (int q = 0; q < size; ++q) memcpy(out + q * bytes, in[q], bytes);
    if (to_all)
      for (int q = 0; q < size; ++q) memcpy(out + q * bytes, (const char *)in[q] + r * bytes, bytes);
  }
  for (int r = 0; r < size; ++r) {
    free(copies[r]);
    finish(slot->ops[r]);
  }
}

static int alike(Slot *slot, int size) {
  for (int r = 1; r < size; ++r) {
    Op *a = slot->ops[0], *b = slot->ops[r];
    if (strcmp(a->kind, b->kind) || a->count != b->count || a->type != b->type || a->root != b->root) return 0;
    if (a->op != b->op && (a->op < 5 || b->op < 5)) return 0;
  }
  return 1;
}

/* Carries out what can be: ranks that differ wait for ever, as they do on a device. */
static void progress(void) {
  if (stalled) return;
  for (Clique *c = cliques; c; c = c->next) {
    for (Slot *s = c->slots; s; s = s->next)
      if (s->arrived == c->size && !s->ops[0]->done && alike(s, c->size)) {
        int gone = 0;
        for (int r = 0; r < c->size; ++r) gone |= s->ops[r]->done;
        if (!gone) run(s, c->size);
      }
    for (Op *a = c->messages; a; a = a->next) {
      if (a->done || strcmp(a->kind, "Send")) continue;
      for (Op *b = c->messages; b; b = b->next)
        if (!b->done && !strcmp(b->kind, "Recv") && b->root == a->comm->rank && a->root == b->comm->rank) {
          if (a->count * size_of(a->type) != b->count * size_of(b->type)) break;
          memcpy(b->recv, a->send, a->count * size_of(a->type));
          finish(a);
          finish(b);
          break;
        }
    }
  }
}

static void give(Op *op) {
  Clique *c = op->comm->clique;
  char text[200];
  snprintf(text, sizeof text, "rank %d: %s count=%zu type=%d op=%d root=%d stream=%ld", op->comm->rank,
           op->kind, op->count, op->type, op->op, op->root, (long)op->stream);
  note(text);
  int place = place_of(op->stream);
  streams[place].given++;
  if (streams[place].first) streams[place].last->after = op;
  else streams[place].first = op;
  streams[place].last = op;
  if (!strcmp(op->kind, "Send") || !strcmp(op->kind, "Recv")) {
    Op **end = &c->messages;
    while (*end) end = &(*end)->next;
    *end = op;
    op->next = NULL;
    return;
  }
  long number = op->comm->calls++;
  Slot **s = &c->slots;
  while (*s && (*s)->number != number) s = &(*s)->next;
  if (!*s) {
    *s = calloc(1, sizeof(Slot));
    (*s)->number = number;
  }
  (*s)->ops[op->comm->rank] = op;
  (*s)->arrived++;
}

static int enqueue(const char *kind, const void *send, void *recv, size_t count, int type, int op, int root, Comm *comm, void *stream) {
  pthread_mutex_lock(&lock);
  int result = next_result;
  next_result = 0;
  if (!result && comm->error) result = comm->error;
  if (!result && (type < 0 || type > (FAKE_VERSION < 22400 ? 9 : 11))) {
    snprintf(last_error, sizeof last_error, "%s : invalid type %d\n", kind, type);
    result = INVALID_ARGUMENT;
  }
  if (!result && root >= comm->size) {
    snprintf(last_error, sizeof last_error, "%s : invalid root %d (root should be in the 0..%d range)\n", kind, root, comm->size);
    result = INVALID_ARGUMENT;
  }
  if (!result) {
    Op *made = calloc(1, sizeof(Op));
    *made = (Op){kind, comm, send, recv, count, type, op, root, 0, stream, NULL, NULL};
    if (depth) {
      Op **end = &group_first;
      while (*end) end = &(*end)->next;
      *end = made;
    } else {
      give(made);
      progress();
    }
  }
  pthread_mutex_unlock(&lock);
  return result;
}

/* NCCL's functions --------------------------------------------------------------------------- */

int ncclGetVersion(int *version) {
  const char *said = getenv("FAKE_NCCL_VERSION");
  *version = said ? atoi(said) : FAKE_VERSION;
  return SUCCESS;
}

const char *ncclGetErrorString(int code) {
  switch (code) {
    case 0: return "no error";
    case 1: return "unhandled cuda error";
    case 4: return "invalid argument";
    case 5: return "invalid usage";
    case 6: return "remote process exited or there was a network error";
    case 7: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}

const char *ncclGetLastError(Comm *comm) { return last_error; }

int ncclGetUniqueId(UniqueId *id) {
  pthread_mutex_lock(&lock);
  memset(id, 0, sizeof *id);
  snprintf(id->bytes, sizeof id->bytes, "fake %d", ++ids);
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

static Clique *clique_of(const char *id, int size) {
  for (Clique *c = cliques; c; c = c->next)
    if (!memcmp(c->id, id, 128)) return c;
  Clique *made = calloc(1, sizeof(Clique));
  memcpy(made->id, id, 128);
  made->size = size;
  made->next = cliques;
  return cliques = made;
}

static Comm *join(Clique *c, int rank, int blocking) {
  Comm *comm = calloc(1, sizeof(Comm));
  *comm = (Comm){.clique = c, .rank = rank, .size = c->size, .device = device, .blocking = blocking};
  c->comms[rank] = comm;
  const char *shared = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  int version;
  ncclGetVersion(&version);
  if (version < 23000 || !shared || !atoi(shared)) shared = NULL;
  if (++c->arrived == c->size) {
    for (int a = 0; a < c->size; ++a)
      for (int b = 0; b < a; ++b)
        if (!shared && c->comms[a]->device == c->comms[b]->device) {
          snprintf(last_error, sizeof last_error, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %d\n", a, b, c->comms[a]->device);
          for (int r = 0; r < c->size; ++r) c->comms[r]->error = INVALID_USAGE;
        }
    pthread_cond_broadcast(&changed);
  }
  return comm;
}

int ncclCommInitRankConfig(Comm **out, int size, UniqueId id, int rank, Config *config) {
  if (config->magic != 0xcafebeef || config->size < 20) return INVALID_ARGUMENT;
  if (size > MAX_RANKS || rank < 0 || rank >= size) return INVALID_ARGUMENT;
  pthread_mutex_lock(&lock);
  char text[100];
  snprintf(text, sizeof text, "rank %d: CommInitRankConfig size=%d blocking=%d min=%d max=%d", rank, size,
           config->blocking, config->min_ctas, config->max_ctas);
  note(text);
  Clique *c = clique_of(id.bytes, size);
  Comm *comm = join(c, rank, config->blocking != 0);
  *out = comm;
  while (comm->blocking && c->arrived < size) pthread_cond_wait(&changed, &lock);
  int result = c->arrived < size ? IN_PROGRESS : comm->error;
  if (!comm->blocking) result = IN_PROGRESS;
  pthread_mutex_unlock(&lock);
  return result;
}

int ncclCommGetAsyncError(Comm *comm, int *error) {
  pthread_mutex_lock(&lock);
  *error = comm->error ? comm->error : comm->clique->arrived < comm->size ? IN_PROGRESS : SUCCESS;
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

int ncclCommFinalize(Comm *comm) {
  pthread_mutex_lock(&lock);
  note("CommFinalize");
  comm->finalized = 1;
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

static int end(Comm *comm, const char *how) {
  pthread_mutex_lock(&lock);
  char text[60];
  snprintf(text, sizeof text, "rank %d: %s", comm->rank, how);
  note(text);
  comm->aborted = 1;
  for (Slot *s = comm->clique->slots; s; s = s->next)
    if (s->ops[comm->rank]) finish(s->ops[comm->rank]);
  for (Op *op = comm->clique->messages; op; op = op->next)
    if (op->comm == comm) finish(op);
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

int ncclCommDestroy(Comm *comm) { return end(comm, "CommDestroy"); }
int ncclCommAbort(Comm *comm) { return end(comm, "CommAbort"); }

int ncclCommCount(Comm *comm, int *out) { return *out = comm->size, SUCCESS; }
int ncclCommUserRank(Comm *comm, int *out) { return *out = comm->rank, SUCCESS; }
int ncclCommCuDevice(Comm *comm, int *out) { return *out = comm->device, SUCCESS; }

static void part(Clique *c, int from, int color, Comm **out) {
  char id[128] = {0};
  int size = 0, rank = 0;
  for (int r = 0; r < c->size; ++r) {
    if (c->colors[r] != color) continue;
    size++;
    rank += c->keys[r] < c->keys[from] || (c->keys[r] == c->keys[from] && r < from);
  }
  snprintf(id, sizeof id, "%s/%d.%d", c->id, c->splits / c->size, color);
  int mine = device;
  device = c->comms[from]->device;
  *out = join(clique_of(id, size), rank, 1);
  device = mine;
}

int ncclCommSplit(Comm *comm, int color, int key, Comm **out, Config *config) {
  pthread_mutex_lock(&lock);
  Clique *c = comm->clique;
  c->colors[comm->rank] = color;
  c->keys[comm->rank] = key;
  c->out[comm->rank] = out;
  int turn = c->splits / c->size;
  if (++c->splits % c->size == 0) {
    for (int r = 0; r < c->size; ++r)
      if (c->colors[r] >= 0) part(c, r, c->colors[r], c->out[r]);
    pthread_cond_broadcast(&changed);
  }
  while (c->splits / c->size == turn) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

#if FAKE_VERSION >= 22700
int ncclCommShrink(Comm *comm, int *excluded, int count, Comm **out, Config *config, int flags) {
  pthread_mutex_lock(&lock);
  Clique *c = comm->clique;
  char id[128] = {0};
  int rank = comm->rank;
  for (int i = 0; i < count; ++i) rank -= excluded[i] < comm->rank;
  snprintf(id, sizeof id, "%s-%d", c->id, excluded[0]);
  Clique *rest = clique_of(id, c->size - count);
  *out = join(rest, rank, 1);
  while (rest->arrived < rest->size) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}
#endif

static void note_of(Comm *comm, const char *what, size_t number) {
  char text[100];
  pthread_mutex_lock(&lock);
  snprintf(text, sizeof text, "rank %d: %s %zu", comm ? comm->rank : device, what, number);
  note(text);
  pthread_mutex_unlock(&lock);
}

#if FAKE_VERSION >= 21900
int ncclCommRegister(Comm *comm, void *buffer, size_t size, void **out) {
  note_of(comm, "CommRegister", size);
  return *out = buffer, SUCCESS;
}
int ncclCommDeregister(Comm *comm, void *registration) {
  note_of(comm, "CommDeregister", 0);
  return SUCCESS;
}
int ncclMemAlloc(void **out, size_t size) {
  note_of(NULL, "MemAlloc", size);
  return size < 1 << 30 && (*out = malloc(size)) ? SUCCESS : 1;
}
int ncclMemFree(void *memory) {
  note_of(NULL, "MemFree", 0);
  return free(memory), SUCCESS;
}
#endif

int ncclGroupStart(void) {
  depth++;
  return SUCCESS;
}

int ncclGroupEnd(void) {
  if (depth == 0) return INVALID_USAGE;
  if (--depth) return SUCCESS;
  pthread_mutex_lock(&lock);
  note("group of:");
  while (group_first) {
    Op *op = group_first;
    group_first = op->next;
    op->next = NULL;
    give(op);
  }
  note("end of group");
  progress();
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

int ncclRedOpCreatePreMulSum(int *out, const void *factor, int type, int residence, Comm *comm) {
  double value = 0;
  switch (type) {
    case 0: value = *(const int8_t *)factor; break;
    case 1: value = *(const uint8_t *)factor; break;
    case 2: value = *(const int32_t *)factor; break;
    case 3: value = *(const uint32_t *)factor; break;
    case 4: value = (double)*(const int64_t *)factor; break;
    case 5: value = (double)*(const uint64_t *)factor; break;
    case 7: value = *(const float *)factor; break;
    case 8: value = *(const double *)factor; break;
    default: value = load(factor, 0, type);
  }
  if (residence != 1 || comm->ops == MAX_OPS) return INVALID_ARGUMENT;
  comm->factors[comm->ops] = value;
  *out = 5 + comm->ops++;
  return SUCCESS;
}
int ncclRedOpDestroy(int op, Comm *comm) { return op < 5 ? INVALID_ARGUMENT : SUCCESS; }

int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, Comm *comm, void *stream) {
  return enqueue("AllReduce", send, recv, count, type, op, -1, comm, stream);
}
int ncclReduce(const void *send, void *recv, size_t count, int type, int op, int root, Comm *comm, void *stream) {
  return enqueue("Reduce", send, recv, count, type, op, root, comm, stream);
}
int ncclBroadcast(const void *send, void *recv, size_t count, int type, int root, Comm *comm, void *stream) {
  return enqueue("Broadcast", send, recv, count, type, 0, root, comm, stream);
}
int ncclAllGather(const void *send, void *recv, size_t count, int type, Comm *comm, void *stream) {
  return enqueue("AllGather", send, recv, count, type, 0, -1, comm, stream);
}
int ncclReduceScatter(const void *send, void *recv, size_t count, int type, int op, Comm *comm, void *stream) {
  return enqueue("ReduceScatter", send, recv, count, type, op, -1, comm, stream);
}
#if FAKE_VERSION >= 22800
int ncclAlltoAll(const void *send, void *recv, size_t count, int type, Comm *comm, void *stream) {
  return enqueue("AlltoAll", send, recv, count, type, 0, -1, comm, stream);
}
int ncclGather(const void *send, void *recv, size_t count, int type, int root, Comm *comm, void *stream) {
  return enqueue("Gather", send, recv, count, type, 0, root, comm, stream);
}
int ncclScatter(const void *send, void *recv, size_t count, int type, int root, Comm *comm, void *stream) {
  return enqueue("Scatter", send, recv, count, type, 0, root, comm, stream);
}
#endif
int ncclSend(const void *data, size_t count, int type, int peer, Comm *comm, void *stream) {
  return enqueue("Send", data, NULL, count, type, 0, peer, comm, stream);
}
int ncclRecv(void *data, size_t count, int type, int peer, Comm *comm, void *stream) {
  return enqueue("Recv", NULL, data, count, type, 0, peer, comm, stream);
}

/* For the tests ------------------------------------------------------------------------------ */

const char *fake_log(void) { return log_text; }
void fake_clear(void) {
  pthread_mutex_lock(&lock);
  log_used = 0;
  log_text[0] = last_error[0] = 0;
  next_result = stalled = 0;
  pthread_mutex_unlock(&lock);
}
void fake_set_device(int number) { device = number; }
void fake_fail_next(int code) { next_result = code; }
/* While it stalls, devices carry out nothing. */
void fake_stall(int on) {
  pthread_mutex_lock(&lock);
  stalled = on;
  progress();
  pthread_mutex_unlock(&lock);
}
void fake_async_error(int rank, int code) {
  pthread_mutex_lock(&lock);
  snprintf(last_error, sizeof last_error, "the network is gone\n");
  for (Clique *c = cliques; c; c = c->next)
    if (rank < c->size && c->comms[rank] && !c->comms[rank]->aborted) c->comms[rank]->error = code;
  pthread_mutex_unlock(&lock);
}
long fake_given(void *stream) {
  pthread_mutex_lock(&lock);
  long found = streams[place_of(stream)].given;
  pthread_mutex_unlock(&lock);
  return found;
}
/* When the last of so many operations of a stream was over, which must have been lately. */
double fake_ended(void *stream, long count) {
  pthread_mutex_lock(&lock);
  double found = count ? streams[place_of(stream)].ended[count % KEPT] : 0;
  pthread_mutex_unlock(&lock);
  return found;
}
/* Waits until so many operations of a stream are over, or for so many seconds. */
int fake_wait(void *stream, long count, double seconds) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += (long)seconds;
  until.tv_nsec += (long)((seconds - (long)seconds) * 1e9);
  if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
  pthread_mutex_lock(&lock);
  int place = place_of(stream), late = 0;
  while (streams[place].finished < count && !late && seconds > 0)
    late = pthread_cond_timedwait(&changed, &lock, &until);
  int done = streams[place].finished >= count;
  pthread_mutex_unlock(&lock);
  return done;
}
