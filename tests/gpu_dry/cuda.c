/* A CUDA runtime, driver and NVML without a GPU, to be preloaded before a CUDA build of torch.
 *
 * Device memory is a memory file, so other processes can open it. What a stream has to do waits in
 * its queue until somebody waits for the stream: a copy that nobody waited for has not happened, as
 * may be on a GPU. Kernels are counted and not computed (cpu_kernels.py computes torch's operators).
 * Each call is a row of the log, which gpu.py reads. Settings, from the environment:
 *
 *   DRY_GPUS   number of GPUs (1); CUDA_VISIBLE_DEVICES chooses among them by number
 *   DRY_NVML   0: NVML cannot be started
 *   DRY_IPC    0: memory of other processes cannot be opened
 *   DRY_MEMORY a file, which processes share to see each other's memory on the GPUs
 *   DRY_STRICT set: a fault ends the process
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define OK cudaSuccess
#define MIB (1ull << 20)
#define GPUS 16
static const size_t TOTAL = 80ull << 30, PAGE = 4096;
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
#define LOCK pthread_mutex_lock(&lock)
#define UNLOCK pthread_mutex_unlock(&lock)

/* The log */

typedef struct { char name[32]; long device; long bytes; void* stream; void* place; } Row;
#define ROWS (1 << 20)
static Row* rows;
static long row_count;
static __thread int current;

static void note(const char* name, int device, size_t bytes, void* stream, const void* place) {
  LOCK;
  if (!rows) rows = mmap(0, ROWS * sizeof(Row), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  Row* row = &rows[row_count++ % ROWS];
  *row = (Row){.device = device, .bytes = (long)bytes, .stream = stream, .place = (void*)place};
  snprintf(row->name, sizeof row->name, "%s", name);
  UNLOCK;
  if (getenv("DRY_STRICT") && (!strncmp(name, "fault", 5) || !strcmp(name, "kernel"))) {
    fprintf(stderr, "%s\n", name);
    abort();
  }
}
#define NOTE(bytes, stream, place) note(__func__, current, bytes, stream, place)
void dry_note(const char* name) { note(name, current, 0, 0, 0); }
const Row* dry_rows(void) { return rows; }
long dry_row_count(void) { return row_count; }

/* Devices */

static int visible[GPUS], visible_count = -1;

static int physical(int device) { return visible[device]; }

static int count_devices(void) {
  LOCK;
  if (visible_count < 0) {
    int all = getenv("DRY_GPUS") ? atoi(getenv("DRY_GPUS")) : 1;
    const char* names = getenv("CUDA_VISIBLE_DEVICES");
    visible_count = 0;
    if (!names)
      for (int i = 0; i < all; i++) visible[visible_count++] = i;
    else
      while (*names >= '0' && *names <= '9') {
        int i = strtol(names, (char**)&names, 10);
        if (i >= all) break;
        visible[visible_count++] = i;
        names += *names == ',';
      }
  }
  UNLOCK;
  return visible_count;
}

/* Memory */

enum { HOST, PINNED, GPU, OPENED, MAPPED };
typedef struct { char* start; size_t size; int kind, device, file; } Block;
static Block blocks[1 << 16];
static int block_count;
static size_t pinned;
size_t dry_pinned(void) { return pinned; }

/* What each process holds of each GPU. A GPU's memory is that of all processes that live. */

#define PROCESSES 256
typedef struct { pid_t process; size_t used[GPUS]; } Held;
typedef struct { Held of[PROCESSES]; size_t peak[GPUS]; } AllHeld;
static AllHeld* all_held;

static size_t* used(void) {
  static Held* own;
  LOCK;
  if (!all_held) {
    const char* path = getenv("DRY_MEMORY");
    int file = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (file >= 0 && ftruncate(file, sizeof *all_held)) abort();
    all_held = mmap(0, sizeof *all_held, PROT_READ | PROT_WRITE, MAP_SHARED | (file < 0 ? MAP_ANONYMOUS : 0), file, 0);
    if (file >= 0) close(file);
  }
  if (!own || own->process != getpid())
    for (own = all_held->of; !__sync_bool_compare_and_swap(&own->process, 0, getpid()); own++)
      if (own == &all_held->of[PROCESSES - 1]) { fprintf(stderr, "cuda.c: more than %d processes\n", PROCESSES); abort(); }
  UNLOCK;
  return own->used;
}
static int lives(pid_t process) { /* a zombie holds nothing */
  char path[32], line[512] = "";
  snprintf(path, sizeof path, "/proc/%d/stat", process);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  if (read(file, line, sizeof line - 1) < 0) line[0] = 0;
  close(file);
  char* end = strrchr(line, ')');
  return end && end[2] != 'Z' && end[2] != 'X';
}
size_t dry_used(int device) { return used()[device]; }
size_t dry_held(int device) {
  used();
  size_t out = 0;
  for (Held* held = all_held->of; held < all_held->of + PROCESSES && held->process; held++)
    if (held->used[device] && lives(held->process)) out += held->used[device];
  return out;
}
static void hold(int device, long change) {
  __sync_add_and_fetch(&used()[device], change);
  size_t now = dry_held(device), peak;
  while ((peak = all_held->peak[device]) < now && !__sync_bool_compare_and_swap(&all_held->peak[device], peak, now));
}
/* Return the most that all processes held since the last call. */
size_t dry_peak(int device) { return __sync_lock_test_and_set(&all_held->peak[device], dry_held(device)); }

static Block* find(const void* place) {
  for (int i = block_count - 1; i >= 0; i--)
    if ((char*)place >= blocks[i].start && (char*)place < blocks[i].start + blocks[i].size) return &blocks[i];
  return NULL;
}

static void add(void* start, size_t size, int kind, int device, int file) {
  blocks[block_count++] = (Block){start, size, kind, device, file};
  if (kind == GPU) hold(device, size);
  if (kind == PINNED) pinned += size;
}

static void drop(Block* block) {
  if (block->kind == GPU) hold(block->device, -block->size);
  if (block->kind == PINNED) pinned -= block->size;
  *block = blocks[--block_count];
}

/* Streams. For the host a task has not happened before somebody waits for it: `first` is the oldest
 * such task. Operators are computed when they are called (cpu_kernels.py); what their stream has to
 * do before them is done then, up to `begun`, but what it writes to the host is kept aside. Each task
 * names what it writes (`to`) and reads (`from`), and is compared with the tasks of other streams that
 * it is not ordered after. */

#define STREAMS 64
#define PATIENCE 8 /* queries are told "not ready" so often */
typedef struct Stream Stream;
typedef struct {
  enum { COPY, SET, OPERATOR, WAIT, CALL } kind;
  char *to, *from, *aside;
  size_t size;
  int value, to_host, staged;
  unsigned long sum; /* of page-locked memory that is read */
  Stream* wait;
  long until;
  cudaHostFn_t call;
  void* data;
} Task;
struct Stream { Task* tasks; long room, base, first, begun, count, after[STREAMS]; int used, number, asked; };
typedef struct { Stream* stream; long until, after[STREAMS]; int asked; } Event;
static Stream default_streams[GPUS], *active[STREAMS];
static int active_count;

static Stream* stream_of(cudaStream_t handle) { return (size_t)handle > 2 ? (Stream*)handle : &default_streams[current]; }
static Task* task_at(Stream* stream, long i) { return &stream->tasks[i - stream->base]; }
static int meet(const char* a, size_t size, const char* b, size_t other) { return a && b && a < b + other && b < a + size; }
static int touches(Task* task, const void* place, size_t size) {
  return meet(task->to, task->size, place, size) || meet(task->from, task->size, place, size);
}
static Task* pending(const void* place, size_t size) {
  for (int i = 0; i < active_count; i++)
    for (long j = active[i]->first; j < active[i]->count; j++)
      if (touches(task_at(active[i], j), place, size)) return task_at(active[i], j);
  return NULL;
}
static unsigned long sum(const char* place, size_t size) {
  unsigned long out = 1;
  for (; size >= 8; size -= 8, place += 8) out = (out ^ *(unsigned long*)place) * 0x9E3779B97F4A7C15;
  while (size--) out = (out ^ *place++) * 0x9E3779B97F4A7C15;
  return out | 1;
}

static Task* push(cudaStream_t handle, Task task) {
  Stream* stream = stream_of(handle);
  if (!stream->used) {
    if (active_count == STREAMS) { fprintf(stderr, "cuda.c: more than %d streams\n", STREAMS); abort(); }
    stream->used = 1;
    active[stream->number = active_count++] = stream;
  }
  for (int i = 0; i < active_count; i++) {
    Stream* other = active[i];
    for (long j = other->count - 1; other != stream && j >= other->first && j >= stream->after[i]; j--) {
      Task* its = task_at(other, j);
      if (!touches(its, task.to, task.size) && !meet(its->to, its->size, task.from, task.size)) continue;
      note("fault: streams race", current, task.size, handle, task.to ? task.to : task.from);
      break;
    }
  }
  if (stream->first == stream->count) stream->base = stream->count;
  if (stream->count - stream->base == stream->room) {
    stream->room = stream->room * 2 + 64;
    stream->tasks = realloc(stream->tasks, stream->room * sizeof(Task));
  }
  *task_at(stream, stream->count) = task;
  return task_at(stream, stream->count++);
}

static void land(Task* task) {
  memmove(task->to, task->aside, task->size);
  free(task->aside);
  task->aside = NULL;
}

static void begin(Task* task) {
  if (task->kind == SET) memset(task->to, task->value, task->size);
  if (task->kind != COPY) return;
  for (int i = 0; i < active_count; i++) /* what the GPU has written to the host, it can read there */
    for (long j = active[i]->first; j < active[i]->begun; j++) {
      Task* its = task_at(active[i], j);
      if (its->aside && meet(its->to, its->size, task->from, task->size)) land(its);
    }
  if (task->to_host) task->aside = memcpy(malloc(task->size), task->from, task->size);
  else memmove(task->to, task->from, task->size);
}

static void finish(Task* task) {
  if (task->aside) land(task);
  if (task->sum && task->sum != sum(task->from, task->size)) note("fault: source of a copy changed", current, task->size, 0, task->from);
  if (task->staged) free(task->from);
  if (task->call) task->call(task->data);
}

static void run(Stream* stream, long until, int for_host) {
  for (long i = for_host ? stream->first : stream->begun; i < until; i++) {
    if (task_at(stream, i)->wait) run(task_at(stream, i)->wait, task_at(stream, i)->until, for_host);
    if (i >= stream->begun) { begin(task_at(stream, i)); stream->begun = i + 1; }
    if (for_host) { finish(task_at(stream, i)); stream->first = i + 1; }
  }
}

static void run_all(void) { for (int i = 0; i < active_count; i++) run(active[i], active[i]->count, 1); }
static void wait_for(cudaStream_t handle) { LOCK; run(stream_of(handle), stream_of(handle)->count, 1); UNLOCK; }

/* An operator on this stream is about to read, or write, memory. */
void dry_operator(int device, cudaStream_t stream, char* place, size_t size, int writes) {
  LOCK;
  int before = current;
  current = device;
  run(stream_of(stream), stream_of(stream)->count, 0);
  push(stream, (Task){OPERATOR, .to = writes ? place : NULL, .from = writes ? NULL : place, .size = size});
  current = before;
  UNLOCK;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) { *out = calloc(1, sizeof(Stream)); return OK; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { wait_for(stream); return OK; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { NOTE(0, stream, 0); wait_for(stream); return OK; }
cudaError_t cudaDeviceSynchronize(void) { NOTE(0, 0, 0); LOCK; run_all(); UNLOCK; return OK; }

static cudaError_t ask(Stream* stream, long until, int* asked) {
  LOCK;
  int ready = !stream || stream->first >= until || (*asked)++ >= PATIENCE;
  if (ready && stream) { run(stream, until, 1); *asked = 0; }
  UNLOCK;
  return ready ? OK : cudaErrorNotReady;
}
cudaError_t cudaStreamQuery(cudaStream_t handle) { Stream* stream = stream_of(handle); return ask(stream, stream->count, &stream->asked); }
cudaError_t cudaEventQuery(cudaEvent_t handle) { Event* event = (Event*)handle; return ask(event->stream, event->until, &event->asked); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) { *out = calloc(1, sizeof(Event)); return OK; }
cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return OK; }
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  NOTE(0, stream_handle, handle);
  LOCK;
  Stream* stream = stream_of(stream_handle);
  Event* event = (Event*)handle;
  *event = (Event){stream, stream->count};
  memcpy(event->after, stream->after, sizeof event->after);
  if (stream->used) event->after[stream->number] = stream->count;
  UNLOCK;
  return OK;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaEventRecord(event, stream); }
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  NOTE(0, 0, handle);
  Event* event = (Event*)handle;
  LOCK; if (event->stream) run(event->stream, event->until, 1); UNLOCK;
  return OK;
}
cudaError_t cudaEventElapsedTime(float* out, cudaEvent_t from, cudaEvent_t to) { *out = 1; return OK; }
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned flags) {
  NOTE(0, handle, event_handle);
  LOCK;
  Stream* stream = stream_of(handle);
  Event* event = (Event*)event_handle;
  for (int i = 0; i < STREAMS; i++)
    if (stream->after[i] < event->after[i]) stream->after[i] = event->after[i];
  if (event->stream && event->stream->first < event->until) push(handle, (Task){WAIT, .wait = event->stream, .until = event->until});
  UNLOCK;
  return OK;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* data) {
  LOCK; push(stream, (Task){CALL, .call = call, .data = data}); UNLOCK; return OK;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus* out) { *out = cudaStreamCaptureStatusNone; return OK; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus* out, unsigned long long* id, cudaGraph_t* g,
                                     const cudaGraphNode_t** d, const cudaGraphEdgeData** e, size_t* n) {
  *out = cudaStreamCaptureStatusNone; if (id) *id = 0; if (n) *n = 0; return OK;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) { return OK; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* low, int* high) { *low = 0; *high = -5; return OK; }

/* Allocation. A memory file has a page more: which other processes have it open. */

static void* new_file(size_t size, int* file) {
  *file = memfd_create("dry-gpu", MFD_CLOEXEC);
  if (ftruncate(*file, size + PAGE)) return MAP_FAILED;
  return mmap(0, size + PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, *file, 0);
}
static int is_open(Block* block) {
  pid_t* openers = (pid_t*)(block->start + block->size);
  for (int i = 0; i < PAGE / sizeof *openers; i++)
    if (openers[i] && lives(openers[i])) return 1;
  return 0;
}
static void replace_opener(Block* block, pid_t before, pid_t after) {
  pid_t* openers = (pid_t*)(block->start + block->size);
  for (int i = 0; i < PAGE / sizeof *openers; i++)
    if (__sync_bool_compare_and_swap(&openers[i], before, after)) return;
  abort();
}

cudaError_t cudaMalloc(void** out, size_t size) {
  size = (size + PAGE - 1) & ~(PAGE - 1);
  NOTE(size, 0, 0);
  count_devices();
  LOCK;
  int file, device = physical(current);
  *out = dry_held(device) + size > TOTAL ? MAP_FAILED : new_file(size, &file);
  if (*out != MAP_FAILED) add(*out, size, GPU, device, file);
  UNLOCK;
  return *out == MAP_FAILED ? cudaErrorMemoryAllocation : OK;
}
cudaError_t cudaFree(void* place) {
  if (!place) return OK;
  LOCK;
  Block* block = find(place);
  NOTE(block ? block->size : 0, 0, place);
  if (!block || block->kind != GPU) { UNLOCK; return cudaErrorInvalidValue; }
  run_all();
  if (is_open(block)) {
    note("fault: freed while open", block->device, block->size, 0, place);
    memset(block->start, 0xA5, block->size);
  }
  munmap(block->start, block->size + PAGE);
  close(block->file);
  drop(block);
  UNLOCK;
  return OK;
}
cudaError_t cudaMallocAsync(void** out, size_t size, cudaStream_t stream) { return cudaErrorNotSupported; }
cudaError_t cudaFreeAsync(void* place, cudaStream_t stream) { return cudaErrorNotSupported; }

cudaError_t cudaHostAlloc(void** out, size_t size, unsigned flags) {
  NOTE(size, 0, 0);
  if (posix_memalign(out, PAGE, size ? size : 1)) return cudaErrorMemoryAllocation;
  LOCK; add(*out, size, PINNED, -1, 0); UNLOCK;
  return OK;
}
cudaError_t cudaHostRegister(void* place, size_t size, unsigned flags) {
  NOTE(size, 0, place); LOCK; add(place, size, PINNED, -1, 0); UNLOCK; return OK;
}
cudaError_t cudaHostUnregister(void* place) {
  NOTE(0, 0, place);
  LOCK;
  Block* block = find(place);
  if (block && pending(place, block->size)) note("fault: unlocked while copied", current, block->size, 0, place);
  run_all();
  if (block) drop(block);
  UNLOCK;
  return block ? OK : cudaErrorInvalidValue;
}
cudaError_t cudaFreeHost(void* place) {
  LOCK; run_all(); cudaError_t failed = cudaHostUnregister(place); UNLOCK;
  if (!failed) free(place);
  return failed;
}
cudaError_t cudaMemGetInfo(size_t* free_, size_t* total) {
  NOTE(0, 0, 0); count_devices(); *total = TOTAL; *free_ = TOTAL - dry_held(physical(current)); return OK;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* out, const void* place) {
  LOCK;
  Block* block = find(place);
  memset(out, 0, sizeof *out);
  out->devicePointer = out->hostPointer = (void*)place;
  out->type = !block ? cudaMemoryTypeUnregistered : block->kind == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  for (int i = 0; block && i < visible_count; i++) if (visible[i] == block->device) out->device = i;
  UNLOCK;
  return OK;
}

/* Copies. A source that is not page-locked is read at once, and such a target is waited for. */

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  LOCK;
  Block *target = find(to), *source = find(from);
  int a = target ? target->kind : HOST, b = source ? source->kind : HOST;
  const char* name = a >= GPU && b >= GPU ? "copy on the GPU" : a >= GPU ? (b ? "copy from pinned" : "copy from pageable")
                     : b >= GPU ? (a ? "copy to pinned" : "copy to pageable") : "copy in the host";
  note(name, current, size, stream, to);
  int own = count_devices() ? physical(current) : 0;
  if (size && ((target && a >= GPU && target->device != own) || (source && b >= GPU && source->device != own)))
    note("fault: memory of another GPU", current, size, stream, to);
  Task task = {COPY, to, (char*)from, .size = size, .to_host = a < GPU};
  if (b == HOST) task.staged = 1, task.from = memcpy(malloc(size), from, size);
  if (b == PINNED && !pending(from, size)) task.sum = sum(from, size);
  push(stream, task);
  if (a == HOST) wait_for(stream);
  UNLOCK;
  return OK;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, enum cudaMemcpyKind kind) {
  NOTE(size, 0, to); LOCK; push(0, (Task){COPY, to, (char*)from, .size = size}); wait_for(0); UNLOCK; return OK;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_step, const void* from, size_t step, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
  for (size_t i = 0; i < height; i++) cudaMemcpyAsync((char*)to + i * to_step, (char*)from + i * step, width, kind, stream);
  return OK;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int a, const void* from, int b, size_t size, cudaStream_t stream) {
  NOTE(size, stream, to); LOCK; push(stream, (Task){COPY, to, (char*)from, .size = size}); UNLOCK; return OK;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
  NOTE(size, stream, to); LOCK; push(stream, (Task){SET, to, .size = size, .value = value}); UNLOCK; return OK;
}
cudaError_t cudaMemset(void* to, int value, size_t size) { return cudaMemsetAsync(to, value, size, 0); }
cudaError_t cudaMemcpyToSymbol(const void* s, const void* p, size_t n, size_t o, enum cudaMemcpyKind k) { return OK; }

cudaError_t cudaHostGetDevicePointer(void** out, void* place, unsigned flags) { *out = place; return OK; }

/* Memory of another process */

typedef struct { int process, file, device; size_t size; ino_t node; } Handle;

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* out, void* place) {
  LOCK;
  Block* block = find(place);
  struct stat info;
  int failed = !block || block->kind != GPU || fstat(block->file, &info);
  if (!failed) {
    memset(out, 0, sizeof *out);
    *(Handle*)out = (Handle){getpid(), block->file, block->device, block->size, info.st_ino};
  }
  NOTE(0, 0, place);
  UNLOCK;
  return failed ? cudaErrorInvalidValue : OK;
}
cudaError_t cudaIpcOpenMemHandle(void** out, cudaIpcMemHandle_t packed, unsigned flags) {
  Handle* handle = (Handle*)&packed;
  char path[64];
  if (getenv("DRY_IPC") && *getenv("DRY_IPC") == '0') return cudaErrorNotSupported;
  struct stat info;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->process, handle->file);
  int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0 || fstat(file, &info) || info.st_ino != handle->node) {
    note("fault: opened after free", current, handle->size, 0, 0);
    return cudaErrorInvalidValue;
  }
  LOCK;
  *out = mmap(0, handle->size + PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  add(*out, handle->size, OPENED, handle->device, file);
  replace_opener(find(*out), 0, getpid());
  NOTE(handle->size, 0, *out);
  UNLOCK;
  return OK;
}
cudaError_t cudaIpcCloseMemHandle(void* place) {
  LOCK;
  Block* block = find(place);
  NOTE(block ? block->size : 0, 0, place);
  if (block) {
    run_all();
    replace_opener(block, getpid(), 0);
    munmap(block->start, block->size + PAGE);
    close(block->file);
    drop(block);
  }
  UNLOCK;
  return block ? OK : cudaErrorInvalidValue;
}
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* out, cudaEvent_t event) { memset(out, 0, sizeof *out); return OK; }
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* out, cudaIpcEventHandle_t handle) { return cudaEventCreate(out); }

/* The driver's memory: addresses and what is mapped there (expandable segments, vLLM's sleep mode) */

typedef struct { int file, device; size_t size; } Physical;

CUresult cuMemGetAllocationGranularity(size_t* out, const CUmemAllocationProp* prop, CUmemAllocationGranularity_flags f) { *out = 2 * MIB; return 0; }
CUresult cuMemAddressReserve(CUdeviceptr* out, size_t size, size_t align, CUdeviceptr hint, unsigned long long flags) {
  NOTE(size, 0, 0);
  void* start = mmap(0, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *out = (CUdeviceptr)start;
  return start == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : 0;
}
CUresult cuMemAddressFree(CUdeviceptr start, size_t size) { munmap((void*)start, size); return 0; }
CUresult cuMemCreate(CUmemGenericAllocationHandle* out, size_t size, const CUmemAllocationProp* prop, unsigned long long flags) {
  NOTE(size, 0, 0);
  count_devices();
  Physical* made = malloc(sizeof *made);
  *made = (Physical){memfd_create("dry-gpu", MFD_CLOEXEC), physical(prop->location.id), size};
  if (dry_held(made->device) + size > TOTAL || ftruncate(made->file, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  hold(made->device, size);
  *out = (CUmemGenericAllocationHandle)made;
  return 0;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Physical* made = (Physical*)handle;
  NOTE(made->size, 0, 0);
  hold(made->device, -made->size);
  close(made->file);
  free(made);
  return 0;
}
CUresult cuMemMap(CUdeviceptr start, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
  Physical* made = (Physical*)handle;
  NOTE(size, 0, (void*)start);
  mmap((void*)start, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, made->file, offset);
  LOCK; add((void*)start, size, MAPPED, made->device, 0); UNLOCK;
  return 0;
}
CUresult cuMemUnmap(CUdeviceptr start, size_t size) {
  NOTE(size, 0, (void*)start);
  LOCK;
  if (pending((void*)start, size)) note("fault: unmapped while used", current, size, 0, (void*)start);
  run_all();
  for (int i = block_count - 1; i >= 0; i--)
    if (blocks[i].kind == MAPPED && blocks[i].start >= (char*)start && blocks[i].start < (char*)start + size) drop(&blocks[i]);
  mmap((void*)start, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  UNLOCK;
  return 0;
}
CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle h, CUmemAllocationHandleType type, unsigned long long f) {
  note("fault: expandable memory shared", current, 0, 0, 0);
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuMemSetAccess(CUdeviceptr p, size_t size, const CUmemAccessDesc* access, size_t count) { return 0; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) { *flags = 0; *active = 1; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice device) { *out = (CUcontext)&visible[device]; return 0; }
CUresult cuCtxGetCurrent(CUcontext* out) { *out = (CUcontext)&visible[current]; return 0; }
CUresult cuCtxSetCurrent(CUcontext context) { return 0; }
CUresult cuGetErrorString(CUresult code, const char** out) { *out = "an error of the dry driver"; return 0; }
CUresult cuDeviceGetAttribute(int* out, CUdevice_attribute name, CUdevice device) { *out = 1; return 0; }
CUresult cuInit(unsigned flags) { return 0; }
CUresult cuDeviceGetCount(int* out) { *out = count_devices(); return 0; }
static CUresult nothing(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult* result) {
  Dl_info own, found;
  *out = dlsym(RTLD_DEFAULT, name);
  dladdr((void*)nothing, &own);
  if (!*out || !dladdr(*out, &found) || found.dli_fbase != own.dli_fbase) *out = (void*)nothing;
  if (result) *result = cudaDriverEntryPointSuccess;
  return OK;
}

CUresult cuGetProcAddress_v2(const char* name, void** out, int version, cuuint64_t flags, CUdriverProcAddressQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, out, version, flags, (void*)result);
}
CUresult cuTensorMapEncodeTiled(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* place, const cuuint64_t* size,
                                const cuuint64_t* steps, const cuuint32_t* box, const cuuint32_t* within, CUtensorMapInterleave i,
                                CUtensorMapSwizzle s, CUtensorMapL2promotion p, CUtensorMapFloatOOBfill f) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuPointerGetAttribute(void* out, CUpointer_attribute name, CUdeviceptr place) { return CUDA_ERROR_NOT_SUPPORTED; }
int cublasHgemm(void) { note("kernel", current, 0, 0, 0); return OK; }

/* Devices and kernels */

cudaError_t cudaDeviceReset(void) { return OK; }
cudaError_t cudaGetDeviceCount(int* out) { *out = count_devices(); return *out ? OK : cudaErrorNoDevice; }
cudaError_t cudaGetDevice(int* out) { *out = current; return OK; }
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= count_devices()) return cudaErrorInvalidDevice;
  current = device;
  NOTE(0, 0, 0);
  return OK;
}
cudaError_t cudaDriverGetVersion(int* out) { *out = 13000; return OK; }
cudaError_t cudaRuntimeGetVersion(int* out) { *out = 13000; return OK; }
cudaError_t cudaGetLastError(void) { return OK; }
cudaError_t cudaPeekAtLastError(void) { return OK; }
const char* cudaGetErrorString(cudaError_t code) { return code == cudaErrorMemoryAllocation ? "out of memory" : "an error of the dry runtime"; }
const char* cudaGetErrorName(cudaError_t code) { return "cudaErrorDry"; }
cudaError_t cudaDeviceCanAccessPeer(int* out, int a, int b) { *out = 0; return OK; }
cudaError_t cudaDeviceEnablePeerAccess(int device, unsigned flags) { return OK; }
cudaError_t cudaDeviceGetPCIBusId(char* out, int size, int device) { snprintf(out, size, "0000:%02x:00.0", physical(device)); return OK; }
cudaError_t cudaDeviceGetAttribute(int* out, enum cudaDeviceAttr name, int device) {
  *out = name == cudaDevAttrComputeCapabilityMajor ? 9 : name == cudaDevAttrComputeCapabilityMinor ? 0
       : name == cudaDevAttrMultiProcessorCount ? 132 : name == cudaDevAttrMaxThreadsPerBlock ? 1024
       : name == cudaDevAttrMaxThreadsPerMultiProcessor ? 2048 : name == cudaDevAttrWarpSize ? 32 : 1;
  return OK;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* out, int device) {
  count_devices();
  *out = (struct cudaDeviceProp){.totalGlobalMem = TOTAL, .major = 9, .multiProcessorCount = 132, .warpSize = 32, .maxThreadsPerBlock = 1024,
    .maxThreadsPerMultiProcessor = 2048, .sharedMemPerBlock = 49152, .sharedMemPerBlockOptin = 232448, .sharedMemPerMultiprocessor = 233472,
    .regsPerBlock = 65536, .regsPerMultiprocessor = 65536, .l2CacheSize = 50 << 20, .maxThreadsDim = {1024, 1024, 64},
    .maxGridSize = {2147483647, 65535, 65535}, .textureAlignment = 512, .unifiedAddressing = 1, .maxBlocksPerMultiProcessor = 32};
  strcpy(out->name, "NVIDIA H100 80GB HBM3");
  char id[17];
  snprintf(id, sizeof id, "dry-gpu-%08d", physical(device));
  memcpy(out->uuid.bytes, id, 16);
  return OK;
}
cudaError_t cudaLaunchKernel(const void* f, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream) { note("kernel", current, 0, stream, f); return OK; }
cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream) { note("kernel", current, 0, stream, f); return OK; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* f, void** args) { note("kernel", current, 0, config->stream, f); return OK; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* out, const void* f) {
  *out = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .binaryVersion = 90, .ptxVersion = 90}; return OK;
}
cudaError_t cudaFuncSetAttribute(const void* f, enum cudaFuncAttribute name, int value) { return OK; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, const void* f, int block, size_t shared, unsigned flags) { *out = 2; return OK; }
cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* f) { *out = (cudaKernel_t)f; return OK; }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) { return OK; }
cudaError_t cudaGetSymbolAddress(void** out, const void* symbol) { static char place[MIB]; *out = place; return OK; }
void** __cudaRegisterFatBinary(void* binary) { static void* handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void** handle) {}
void __cudaUnregisterFatBinary(void** handle) {}
void __cudaRegisterFunction(void** h, const char* f, char* d, const char* n, int t, uint3* a, uint3* b, dim3* c, dim3* e, int* w) {}
void __cudaRegisterVar(void** h, char* v, char* a, const char* n, int e, size_t s, int c, int g) {}

/* NVML */

static int nvml_fails(void) { const char* on = getenv("DRY_NVML"); return on && *on == '0'; }
int nvmlInit_v2(void) { return nvml_fails(); }
int nvmlInitWithFlags(unsigned flags) { return nvml_fails(); }
int nvmlShutdown(void) { return 0; }
const char* nvmlErrorString(int code) { return "an error of the dry NVML"; }
int nvmlDeviceGetCount_v2(unsigned* out) { *out = getenv("DRY_GPUS") ? atoi(getenv("DRY_GPUS")) : 1; return nvml_fails(); }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void** out) { *out = (void*)(size_t)(i + 1); return nvml_fails(); }
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** out) { *out = (void*)(strtol(id + 5, 0, 16) + 1); return nvml_fails(); }
int nvmlDeviceGetName(void* device, char* out, unsigned size) { snprintf(out, size, "NVIDIA H100 80GB HBM3"); return 0; }
int nvmlDeviceGetCudaComputeCapability(void* device, int* major, int* minor) { *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetMemoryInfo(void* device, unsigned long long* out) {
  out[0] = TOTAL; out[2] = dry_held((size_t)device - 1); out[1] = TOTAL - out[2]; return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, void* out) { *count = 0; return 0; }
int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned* count, void* out) { *count = 0; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void* device, unsigned link, void* out) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* device, unsigned link, void* out) { return 3; }
int nvmlDeviceGetGpuFabricInfoV(void* device, void* out) { return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* out) { *out = 13000; return 0; }
int nvmlSystemGetDriverVersion(char* out, unsigned size) { snprintf(out, size, "580.00"); return 0; }
