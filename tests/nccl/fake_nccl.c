/* A libnccl for the tests: ranks are threads of one process, or of several, and devices are host memory.

   Calls return at once, as on a stream; an operation is carried out when what its stream was given
   before is done, and the last rank it needs has come. What was called stands in a log. The functions
   fake_* are for the tests.

   Processes meet where FAKE_NCCL_FOLDER names a folder, which must be empty at first: a unique id is a
   name in it, and what a rank tells the others is a file there, which appears whole. Each rank works
   out its own results, from the files of all. A rank that is there holds a lock of its file, so that
   the others can see that its process has ended; they report it, as NCCL may, only where
   FAKE_NCCL_REMOTE_ERRORS is set. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#ifndef FAKE_VERSION
#define FAKE_VERSION 22803
#endif

enum { SUCCESS = 0, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum { MAX_RANKS = 16, MAX_STREAMS = 4096, MAX_OPS = 64, KEPT = 256 };

typedef struct Clique Clique;
typedef struct Comm {
  Clique *clique;
  int rank, size, device, blocking, error, aborted, finalized, ops;
  int presence; /* the file that tells other processes of this rank; it is locked */
  long calls, sent[MAX_RANKS], received[MAX_RANKS];
  double factors[MAX_OPS];
} Comm;

typedef struct Op {
  const char *kind;
  Comm *comm;
  const void *send;
  void *recv;
  size_t count; /* of a wait: how many operations of stream `root` must be over */
  int type, op, root, done, told;
  void *stream;
  long group, number; /* of a message: among those from the sender to the receiver */
  struct Op *next;
  struct Op *after; /* on the same stream */
} Op;

typedef struct Slot { /* a collective: a call of every rank */
  long number;
  Op *ops[MAX_RANKS]; /* of ranks of this process */
  struct Slot *next;
} Slot;

struct Clique {
  char id[128];
  int size, arrived, splits, shared, alive;
  Comm *comms[MAX_RANKS]; /* of this process */
  int devices[MAX_RANKS], here[MAX_RANKS];
  int colors[MAX_RANKS], keys[MAX_RANKS];
  Comm **out[MAX_RANKS];
  Slot *slots;
  Op *messages;
  struct Clique *next;
};

typedef struct { size_t size; unsigned magic, version; int blocking, cga, min_ctas, max_ctas; const char *net; int split_share; } Config;
typedef struct { char bytes[128]; } UniqueId;
typedef struct { char kind[16]; size_t count; int type, op, root; double factor; } Call; /* as one rank makes it */

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
static long groups;

static int version_here(void) {
  const char *said = getenv("FAKE_NCCL_VERSION");
  return said ? atoi(said) : FAKE_VERSION;
}

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
    if (!first->comm) continue; /* a wait */
    streams[place].finished++;  /* in their order */
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

/* Files of other processes -------------------------------------------------------------------- */

static void name_of(char *path, size_t room, Clique *c, const char *what) {
  snprintf(path, room, "%s/%.100s.%s", getenv("FAKE_NCCL_FOLDER"), c->id, what);
}

/* Lets a file appear that has all of this in it; returns it, open. */
static int tell(Clique *c, const char *what, const void *head, size_t head_bytes, const void *data, size_t bytes) {
  char path[600], made[620];
  name_of(path, sizeof path, c, what);
  snprintf(made, sizeof made, "%s.%d", path, getpid());
  int file = open(made, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0 || flock(file, LOCK_EX) || write(file, head, head_bytes) != (ssize_t)head_bytes ||
      write(file, data, bytes) != (ssize_t)bytes || rename(made, path))
    abort();
  return file;
}

/* Reads a file that is there, as malloc has it; NULL: it is not. */
static void *told(Clique *c, const char *what, void *head, size_t head_bytes) {
  char path[600];
  name_of(path, sizeof path, c, what);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return NULL;
  size_t bytes = (size_t)lseek(file, 0, SEEK_END) - head_bytes;
  char *data = malloc(bytes + 1);
  if (pread(file, head, head_bytes, 0) != (ssize_t)head_bytes || pread(file, data, bytes, (off_t)head_bytes) != (ssize_t)bytes) abort();
  close(file);
  return data;
}

static int is_there(Clique *c, const char *what) {
  char path[600];
  name_of(path, sizeof path, c, what);
  return access(path, F_OK) == 0;
}

static void forget(Clique *c, const char *what) {
  char path[600];
  name_of(path, sizeof path, c, what);
  unlink(path);
}

static void fail_duplicates(Clique *c) {
  const char *shares = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  if (version_here() >= 23000 && shares && atoi(shares)) return;
  for (int a = 0; a < c->size; ++a)
    for (int b = 0; b < a; ++b)
      if (c->devices[a] == c->devices[b]) {
        snprintf(last_error, sizeof last_error, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %d\n", a, b, c->devices[a]);
        for (int r = 0; r < c->size; ++r)
          if (c->comms[r]) c->comms[r]->error = INVALID_USAGE;
      }
}

/* Finds the ranks that have come, and those that have ended without a message. */
static void look_around(Clique *c) {
  char what[40];
  for (int r = 0; r < c->size; ++r) {
    if (c->here[r]) continue;
    snprintf(what, sizeof what, "rank%d", r);
    void *data = told(c, what, &c->devices[r], sizeof(int));
    if (!data) continue;
    free(data);
    c->here[r] = 1;
    if (++c->arrived == c->size) fail_duplicates(c);
    pthread_cond_broadcast(&changed);
  }
  if (c->arrived < c->size || !getenv("FAKE_NCCL_REMOTE_ERRORS")) return;
  for (int r = 0; r < c->size; ++r) {
    if (c->comms[r]) continue;
    char path[600];
    snprintf(what, sizeof what, "rank%d", r);
    name_of(path, sizeof path, c, what);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) continue; /* it has left in good order */
    if (flock(file, LOCK_SH | LOCK_NB) == 0)
      for (int q = 0; q < c->size; ++q)
        if (c->comms[q] && !c->comms[q]->error) {
          snprintf(last_error, sizeof last_error, "socket of a peer was closed\n");
          c->comms[q]->error = REMOTE_ERROR;
        }
    close(file);
  }
}

/* What happens when ------------------------------------------------------------------------- */

/* Whether all is done that its stream was given before. Ranks of one communicator that share a stream
   stand for processes, which do not. */
static int ready(Op *op) {
  for (Op *o = streams[place_of(op->stream)].first; o != op; o = o->after)
    if (!o->done && o->group != op->group && !(o->comm && o->comm != op->comm && o->comm->clique == op->comm->clique)) return 0;
  return 1;
}

static int moves_from_root(const char *kind) { return !strcmp(kind, "Broadcast") || !strcmp(kind, "Scatter"); }

/* How many elements of each rank an operation has. */
static size_t parts_of(const char *kind, int size) {
  return !strcmp(kind, "ReduceScatter") || !strcmp(kind, "AlltoAll") || !strcmp(kind, "Scatter") ? size : 1;
}

static Call call_of(Op *op) {
  Call call = {.count = op->count, .type = op->type, .op = op->op > 4 ? 5 : op->op, .root = op->root};
  strcpy(call.kind, op->kind);
  if (op->op > 4) call.factor = op->comm->factors[op->op - 5];
  return call;
}

/* Finds what all ranks bring to a call, when all have come; every input is a copy, as ranks may work in place. */
static int bring(Clique *c, Slot *slot, Call *calls, void **copies) {
  char what[60];
  for (int r = 0; r < c->size; ++r) {
    Op *op = slot->ops[r];
    if (op && (op->done || !ready(op))) return 0;
    if (!op && !c->shared) return 0;
    snprintf(what, sizeof what, "call%ld.%d", slot->number, r);
    if (c->shared && op && !op->told) {
      Call call = call_of(op);
      int reads = !moves_from_root(op->kind) || r == op->root;
      close(tell(c, what, &call, sizeof call, op->send, reads ? op->count * size_of(op->type) * parts_of(op->kind, c->size) : 0));
      op->told = 1;
    }
  }
  for (int r = 0; c->shared && r < c->size; ++r) {
    snprintf(what, sizeof what, "call%ld.%d", slot->number, r);
    if (!slot->ops[r] && !is_there(c, what)) return 0;
  }
  for (int r = 0; r < c->size; ++r) {
    Op *op = slot->ops[r];
    snprintf(what, sizeof what, "call%ld.%d", slot->number, r);
    if (!op) {
      copies[r] = told(c, what, &calls[r], sizeof calls[r]);
      continue;
    }
    size_t bytes = op->count * size_of(op->type) * parts_of(op->kind, c->size);
    calls[r] = call_of(op);
    copies[r] = malloc(bytes + 1);
    if (!moves_from_root(op->kind) || r == op->root) memcpy(copies[r], op->send, bytes);
  }
  return 1;
}

static int alike(const Call *calls, int size) {
  for (int r = 1; r < size; ++r) {
    const Call *a = &calls[0], *b = &calls[r];
    if (strcmp(a->kind, b->kind) || a->count != b->count || a->type != b->type || a->root != b->root || a->op != b->op) return 0;
  }
  return 1;
}

/* Carries out a call, for the ranks of this process; ranks that differ wait for ever, as they do on a device. */
static int run(Clique *c, Slot *slot) {
  Call calls[MAX_RANKS];
  void *in[MAX_RANKS];
  if (!bring(c, slot, calls, in)) return 0;
  int size = c->size, fits = alike(calls, size), root = calls[0].root;
  const char *kind = calls[0].kind;
  size_t count = calls[0].count, bytes = count * size_of(calls[0].type);
  double factors[MAX_RANKS];
  for (int r = 0; r < size; ++r) factors[r] = calls[r].factor;
  for (int r = 0; fits && r < size; ++r) {
    if (!slot->ops[r]) continue;
    char *out = slot->ops[r]->recv;
    int parts = !strcmp(kind, "ReduceScatter");
    if (!strcmp(kind, "AllReduce") || parts || (!strcmp(kind, "Reduce") && r == root))
      combine((const void **)in, out, size, parts ? r * count : 0, count, calls[0].type, calls[0].op, factors);
    if (!strcmp(kind, "Broadcast")) memcpy(out, in[root], bytes);
    if (!strcmp(kind, "Scatter")) memcpy(out, (const char *)in[root] + r * bytes, bytes);
    if (!strcmp(kind, "AllGather") || (!strcmp(kind, "Gather") && r == root))
      for (int q = 0; q < size; ++q) memcpy(out + q * bytes, in[q], bytes);
    if (!strcmp(kind, "AlltoAll"))
      for (int q = 0; q < size; ++q) memcpy(out + q * bytes, (const char *)in[q] + r * bytes, bytes);
  }
  for (int r = 0; r < size; ++r) {
    free(in[r]);
    if (fits && slot->ops[r]) finish(slot->ops[r]);
  }
  return fits;
}

/* Carries out a send or a receive. Short messages are buffered, as NCCL does it: they are sent before
   somebody receives them. */
static int message(Clique *c, Op *a) {
  char what[60];
  int sends = !strcmp(a->kind, "Send"), rank = a->comm->rank, from = sends ? rank : a->root, to = sends ? a->root : rank;
  size_t bytes = a->count * size_of(a->type), theirs = 0;
  if (a->done || !ready(a)) return 0;
  snprintf(what, sizeof what, "from%d.to%d.%ld", from, to, a->number);
  if (sends) {
    const char *room = getenv("FAKE_NCCL_BUFFER");
    int over = a->told && c->shared && !is_there(c, what);
    if (!a->told) {
      if (c->shared) close(tell(c, what, &bytes, sizeof bytes, a->send, bytes));
      else a->send = memcpy(malloc(bytes + 1), a->send, bytes);
      a->told = 1; /* it stays until it is received */
      over = !room || bytes <= (size_t)atol(room);
    }
    if (over && c->shared) a->told = 0;
    if (over) finish(a);
    return over;
  }
  void *data = NULL;
  if (c->shared) data = told(c, what, &theirs, sizeof theirs);
  for (Op *b = c->messages; !c->shared && b; b = b->next)
    if (b->told && b->comm->rank == from && b->root == to && b->number == a->number) {
      theirs = b->count * size_of(b->type);
      if (theirs != bytes) break;
      b->told = 0;
      data = (void *)b->send;
      if (!b->done) finish(b);
    }
  int fits = data && theirs == bytes;
  if (fits) memcpy(a->recv, data, bytes), finish(a);
  if (fits && c->shared) forget(c, what);
  free(data);
  return fits;
}

static void progress(void) {
  for (int again = !stalled; again;) {
    again = 0;
    for (int i = 0; i < num_streams; ++i) {
      Op *wait = streams[i].first;
      if (wait && !wait->comm && streams[wait->root].finished >= (long)wait->count) finish(wait), again = 1;
    }
    for (Clique *c = cliques; c; c = c->next) {
      for (Slot **s = &c->slots; *s;) {
        if (run(c, *s)) *s = (*s)->next, again = 1;
        else s = &(*s)->next;
      }
      for (Op **m = &c->messages; *m;) {
        again |= message(c, *m);
        if ((*m)->done && !(*m)->told) *m = (*m)->next;
        else m = &(*m)->next;
      }
    }
  }
}

/* Looks for what other processes have done. */
static void *watch(void *_) {
  for (;;) {
    struct timespec pause = {0, 200000};
    nanosleep(&pause, NULL);
    pthread_mutex_lock(&lock);
    for (Clique *c = cliques; c; c = c->next)
      if (c->shared && c->alive) look_around(c);
    progress();
    pthread_mutex_unlock(&lock);
  }
  return NULL;
}

static void put(Op *op) {
  int place = place_of(op->stream);
  if (streams[place].first) streams[place].last->after = op;
  else streams[place].first = op;
  streams[place].last = op;
}

static void give(Op *op) {
  Clique *c = op->comm->clique;
  char text[200];
  snprintf(text, sizeof text, "rank %d: %s count=%zu type=%d op=%d root=%d stream=%ld", op->comm->rank,
           op->kind, op->count, op->type, op->op, op->root, (long)op->stream);
  note(text);
  op->group = groups;
  streams[place_of(op->stream)].given++;
  put(op);
  if (!strcmp(op->kind, "Send") || !strcmp(op->kind, "Recv")) {
    op->number = (!strcmp(op->kind, "Send") ? op->comm->sent : op->comm->received)[op->root]++;
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
    *made = (Op){.kind = kind, .comm = comm, .send = send, .recv = recv, .count = count, .type = type, .op = op, .root = root, .stream = stream};
    if (depth) {
      Op **end = &group_first;
      while (*end) end = &(*end)->next;
      *end = made;
    } else {
      groups++;
      give(made);
      progress();
    }
  }
  pthread_mutex_unlock(&lock);
  return result;
}

/* NCCL's functions --------------------------------------------------------------------------- */

int ncclGetVersion(int *version) { return *version = version_here(), SUCCESS; }

const char *ncclGetErrorString(int code) {
  switch (code) {
    case 0: return "no error";
    case 1: return "unhandled cuda error";
    case 3: return "internal error";
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
  snprintf(id->bytes, sizeof id->bytes, "fake %d %d", getpid(), ++ids);
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

static Clique *clique_of(const char *id, int size) {
  for (Clique *c = cliques; c; c = c->next)
    if (!memcmp(c->id, id, 128)) return c;
  Clique *made = calloc(1, sizeof(Clique));
  memcpy(made->id, id, 128);
  made->size = size;
  made->shared = getenv("FAKE_NCCL_FOLDER") != NULL;
  made->next = cliques;
  return cliques = made;
}

static Comm *join(Clique *c, int rank, int blocking) {
  static int watched;
  Comm *comm = calloc(1, sizeof(Comm));
  *comm = (Comm){.clique = c, .rank = rank, .size = c->size, .device = device, .blocking = blocking};
  c->comms[rank] = comm;
  c->alive++;
  if (c->shared) {
    char what[40];
    snprintf(what, sizeof what, "rank%d", rank);
    comm->presence = tell(c, what, &device, sizeof device, "", 0);
    pthread_t thread;
    if (!watched++ && pthread_create(&thread, NULL, watch, NULL)) abort();
    return comm;
  }
  c->devices[rank] = device;
  if (++c->arrived == c->size) fail_duplicates(c);
  pthread_cond_broadcast(&changed);
  return comm;
}

int ncclCommInitRankConfig(Comm **out, int size, UniqueId id, int rank, Config *config) {
  if (config->magic != 0xcafebeef || config->size < 20) return INVALID_ARGUMENT;
  if (size > MAX_RANKS || rank < 0 || rank >= size) return INVALID_ARGUMENT;
  pthread_mutex_lock(&lock);
  char text[200];
  snprintf(text, sizeof text, "rank %d: CommInitRankConfig size=%d blocking=%d min=%d max=%d cga=%d share=%d version=%u",
           rank, size, config->blocking, config->min_ctas, config->max_ctas, config->cga, config->split_share, config->version);
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
  comm->clique->alive--;
  if (comm->clique->shared) {
    snprintf(text, sizeof text, "rank%d", comm->rank);
    forget(comm->clique, text);
    close(comm->presence);
  }
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
  snprintf(id, sizeof id, "%.90s/%d.%d", c->id, c->splits / c->size, color);
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
  snprintf(id, sizeof id, "%.90s-%d", c->id, excluded[0]);
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
  groups++;
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
/* Lets a stream wait until so many operations of another one are over. */
void fake_let_wait(void *stream, void *other, long count) {
  pthread_mutex_lock(&lock);
  int place = place_of(other);
  if (streams[place].finished < count) {
    Op *wait = calloc(1, sizeof(Op));
    *wait = (Op){.kind = "Wait", .stream = stream, .root = place, .count = (size_t)count, .group = -1};
    put(wait);
  }
  pthread_mutex_unlock(&lock);
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
