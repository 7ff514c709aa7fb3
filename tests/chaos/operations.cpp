// A library for LD_PRELOAD that counts the file operations of a process below a folder, and disturbs the n-th.
//
// Python, LMDB, Arrow, HDF5, safetensors and torch all reach files through these functions of libc. The plan lies in
// shared memory, so that processes that the command starts count along: those forked by inheritance, others by
// OPERATIONS_PLAN. Not seen: what fwrite writes to a file of fopen, and what is written to mapped memory.
#include <atomic>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

namespace {
enum Act { COUNT, KILL_BEFORE, KILL_AFTER, FAIL_ONCE, FAIL_FROM };

struct Plan {
  std::atomic<int> count;
  int at, act, error;
  char root[PATH_MAX], log[PATH_MAX];
};
Plan* plan = nullptr;
int log_file = -1;

void die() {
  kill(0, SIGKILL);  // the process group: what the command started dies with it
  pause();
}

struct Operation {
  int error = 0;
  bool kills_after = false;

  // ``grows``: a full disk or an exhausted quota can refuse it.
  Operation(const char* kind, const char* path, const char* other = "", bool grows = true) {
    if (plan == nullptr) return;
    size_t length = strlen(plan->root);
    bool is_upload = strncmp(path, "s3://", 5) == 0;
    const char* ending = strrchr(path, ' ');  // " (deleted)" of a file that has no name any more
    if (ending != nullptr && strcmp(ending, " (deleted)") == 0) return;
    if (strncmp(path, plan->root, length) != 0 && strncmp(other, plan->root, length) != 0 && !is_upload) return;
    int saved = errno, number = ++plan->count;
    char line[2 * PATH_MAX + 64];
    int size = snprintf(line, sizeof line, "%d\t%s\t%s\t%s\n", number, kind, path, other);
    syscall(SYS_write, log_file, line, size);
    bool is_due = plan->act == FAIL_FROM ? number >= plan->at : number == plan->at;
    bool is_room = plan->error == ENOSPC || plan->error == EDQUOT;
    if (is_due && plan->act != COUNT) {
      if (plan->act == KILL_BEFORE) die();
      kills_after = plan->act == KILL_AFTER;
      if (!kills_after && (grows || !is_room)) error = plan->error;
    }
    errno = error ? error : saved;
  }
  ~Operation() {
    if (kills_after) die();
  }
};

// The name of an open file or folder; empty for a pipe and the like.
void name_of(int descriptor, char* name) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t size = syscall(SYS_readlink, link, name, PATH_MAX - 1);
  name[size > 0 ? size : 0] = 0;
}

struct Path {
  char text[2 * PATH_MAX];
  Path(const char* path, int folder = AT_FDCWD) {
    text[0] = 0;
    if (path == nullptr) return;
    if (path[0] != '/') {
      if (folder == AT_FDCWD) syscall(SYS_getcwd, text, PATH_MAX);
      else name_of(folder, text);
      strcat(text, "/");
    }
    strncat(text, path, PATH_MAX - 1);
  }
  explicit Path(int descriptor) { name_of(descriptor, text); }
};

bool writes(int flags) { return flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC); }
}  // namespace

// NAMED(result, function, parameters): a definition that takes the place of libc's, which ``next`` then is.
#define NAMED(result, name, ...) \
  extern "C" result own_##name(__VA_ARGS__) asm(#name); \
  extern "C" result own_##name(__VA_ARGS__)
#define NEXT(name) static auto next = reinterpret_cast<decltype(&own_##name)>(dlsym(RTLD_NEXT, #name))

#define OPENING(name, CALL, PATH, ...) \
  NAMED(int, name, __VA_ARGS__, int flags, ...) { \
    NEXT(name); \
    va_list rest; \
    va_start(rest, flags); \
    int mode = (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(rest, int) : 0; \
    va_end(rest); \
    if (plan == nullptr || !writes(flags)) return next CALL; \
    Operation operation("open", PATH.text, "", flags & O_CREAT); \
    return operation.error ? -1 : next CALL; \
  }
OPENING(open, (path, flags, mode), Path(path), const char* path)
OPENING(open64, (path, flags, mode), Path(path), const char* path)
OPENING(openat, (folder, path, flags, mode), Path(path, folder), int folder, const char* path)
OPENING(openat64, (folder, path, flags, mode), Path(path, folder), int folder, const char* path)

#define FOPEN(name) \
  NAMED(FILE*, name, const char* path, const char* mode) { \
    NEXT(name); \
    if (plan == nullptr || strpbrk(mode, "wa+") == nullptr) return next(path, mode); \
    Operation operation("open", Path(path).text); \
    return operation.error ? nullptr : next(path, mode); \
  }
FOPEN(fopen)
FOPEN(fopen64)

// CALLED(function, kind, path, other path, whether a full disk refuses it, arguments, parameters)
#define CALLED(name, kind, PATH, OTHER, grows, CALL, ...) \
  NAMED(int, name, __VA_ARGS__) { \
    NEXT(name); \
    if (plan == nullptr) return next CALL; \
    Operation operation(kind, PATH.text, OTHER.text, grows); \
    return operation.error ? -1 : next CALL; \
  }
#define NONE Path(nullptr)
CALLED(rename, "rename", Path(a), Path(b), true, (a, b), const char* a, const char* b)
CALLED(renameat, "rename", Path(a, f), Path(b, g), true, (f, a, g, b), int f, const char* a, int g, const char* b)
CALLED(renameat2, "renameat2", Path(a, f), Path(b, g), true, (f, a, g, b, flags), int f, const char* a, int g,
       const char* b, unsigned flags)
CALLED(link, "link", Path(a), Path(b), true, (a, b), const char* a, const char* b)
CALLED(linkat, "link", Path(a, f), Path(b, g), true, (f, a, g, b, flags), int f, const char* a, int g, const char* b,
       int flags)
CALLED(symlink, "symlink", Path(b), NONE, true, (a, b), const char* a, const char* b)
CALLED(symlinkat, "symlink", Path(b, g), NONE, true, (a, g, b), const char* a, int g, const char* b)
CALLED(unlink, "unlink", Path(path), NONE, false, (path), const char* path)
CALLED(unlinkat, flags ? "rmdir" : "unlink", Path(path, folder), NONE, false, (folder, path, flags), int folder,
       const char* path, int flags)
CALLED(rmdir, "rmdir", Path(path), NONE, false, (path), const char* path)
CALLED(mkdir, "mkdir", Path(path), NONE, true, (path, mode), const char* path, mode_t mode)
CALLED(mkdirat, "mkdir", Path(path, folder), NONE, true, (folder, path, mode), int folder, const char* path, mode_t mode)
CALLED(chmod, "chmod", Path(path), NONE, false, (path, mode), const char* path, mode_t mode)
CALLED(fchmod, "chmod", Path(file), NONE, false, (file, mode), int file, mode_t mode)
CALLED(fchmodat, "chmod", Path(path, folder), NONE, false, (folder, path, mode, flags), int folder, const char* path,
       mode_t mode, int flags)
CALLED(fsync, "fsync", Path(file), NONE, true, (file), int file)
CALLED(fdatasync, "fsync", Path(file), NONE, true, (file), int file)
CALLED(truncate, "truncate", Path(path), NONE, true, (path, size), const char* path, off_t size)
CALLED(truncate64, "truncate", Path(path), NONE, true, (path, size), const char* path, off_t size)
CALLED(ftruncate, "truncate", Path(file), NONE, true, (file, size), int file, off_t size)
CALLED(ftruncate64, "truncate", Path(file), NONE, true, (file, size), int file, off_t size)

// A write that a kill cuts short leaves half of its bytes.
#define WRITING(name, file, half, CALL, ...) \
  NAMED(ssize_t, name, __VA_ARGS__) { \
    NEXT(name); \
    if (plan == nullptr) return next CALL; \
    Operation operation("write", Path(file).text); \
    if (operation.kills_after) half; \
    return operation.error ? -1 : next CALL; \
  }
WRITING(write, file, size /= 2, (file, bytes, size), int file, const void* bytes, size_t size)
WRITING(pwrite, file, size /= 2, (file, bytes, size, at), int file, const void* bytes, size_t size, off_t at)
WRITING(pwrite64, file, size /= 2, (file, bytes, size, at), int file, const void* bytes, size_t size, off_t at)
WRITING(writev, file, count /= 2, (file, parts, count), int file, const iovec* parts, int count)
WRITING(pwritev, file, count /= 2, (file, parts, count, at), int file, const iovec* parts, int count, off_t at)
WRITING(pwritev64, file, count /= 2, (file, parts, count, at), int file, const iovec* parts, int count, off_t at)
WRITING(sendfile, to, size /= 2, (to, from, at, size), int to, int from, off_t* at, size_t size)
WRITING(sendfile64, to, size /= 2, (to, from, at, size), int to, int from, off_t* at, size_t size)
WRITING(copy_file_range, to, size /= 2, (from, at, to, into, size, flags), int from, off_t* at, int to, off_t* into,
        size_t size, unsigned flags)

static void join(const char* file) {
  int descriptor = syscall(SYS_open, file, O_RDWR | O_CREAT, 0600);
  syscall(SYS_ftruncate, descriptor, sizeof(Plan));
  plan = static_cast<Plan*>(mmap(nullptr, sizeof(Plan), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0));
  syscall(SYS_close, descriptor);
  log_file = syscall(SYS_open, plan->log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
}
__attribute__((constructor)) static void begin() {
  const char* file = getenv("OPERATIONS_PLAN");
  if (file != nullptr) join(file);
}

// Called by tests/chaos/operations.py, in the process of a command: what follows is counted, and disturbed.
extern "C" void arm(const char* file, const char* root, const char* log, int at, int act, int error) {
  Plan made = {{0}, at, act, error};
  strncpy(made.root, root, PATH_MAX - 1);
  strncpy(made.log, log, PATH_MAX - 1);
  int descriptor = syscall(SYS_open, file, O_RDWR | O_CREAT, 0600);
  syscall(SYS_write, descriptor, &made, sizeof made);
  syscall(SYS_close, descriptor);
  setenv("OPERATIONS_PLAN", file, 1);
  join(file);
}

// An operation of another kind: its error, 0, or -1 where ``disturb_after`` is to follow it.
extern "C" int disturb(const char* kind, const char* path) {
  Operation operation(kind, path);
  bool kills_after = operation.kills_after;
  operation.kills_after = false;
  return kills_after ? -1 : operation.error;
}
extern "C" void disturb_after() { die(); }
