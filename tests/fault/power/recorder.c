/* Preloaded into a process, it notes what that does to files below KVTIER_RECORDED, in KVTIER_RECORD, in order.
 *
 * Always: a call and its note happen under one lock, so that the notes tell what was complete when a sync began. A
 * note is `struct note`, the file's path, then the bytes. Calls that fail are not noted. Offsets and lengths in bytes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { MADE = 'm', WRITE = 'w', DURABLE_WRITE = 'd', SYNC = 's', NAMES = 'n', CUT = 'c', CLAIM = 'f', PUNCH = 'p' };

struct note {
    uint32_t kind, path_bytes;
    uint64_t offset, length, data_bytes;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int record = -1;

static void put(const void *bytes, size_t length) {
    const char *at = bytes;
    while (length) {
        long put = syscall(SYS_write, record, at, length);
        if (put <= 0) abort();
        at += put, length -= put;
    }
}

/* The path of an open file, or NULL if it is none of those recorded. */
static const char *path_of(int fd, char *path, size_t size) {
    const char *root = getenv("KVTIER_RECORDED"), *name = getenv("KVTIER_RECORD");
    char link[40] = "/proc/self/fd/", digits[16];
    int n = 0;
    if (!root || !name || fd < 0) return NULL;
    for (int rest = fd; n == 0 || rest; rest /= 10) digits[n++] = '0' + rest % 10;
    for (char *at = link + strlen(link); n; *at = 0) *at++ = digits[--n];
    ssize_t length = readlink(link, path, size - 1);
    if (length <= 0) return NULL;
    path[length] = 0;
    if (strncmp(path, root, strlen(root))) return NULL;
    if (record < 0) record = syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (record < 0) abort();
    return path;
}

static void head(enum kind kind, const char *path, uint64_t offset, uint64_t length, uint64_t data_bytes) {
    struct note note = {kind, strlen(path), offset, length, data_bytes};
    put(&note, sizeof note);
    put(path, note.path_bytes);
}

static void noted(enum kind kind, int fd, uint64_t offset, uint64_t length) {
    char path[4096];
    if (path_of(fd, path, sizeof path)) head(kind, path, offset, length, 0);
}

static void written(int fd, const struct iovec *parts, int count, uint64_t offset, ssize_t length) {
    char path[4096];
    if (length <= 0 || !path_of(fd, path, sizeof path)) return;
    enum kind kind = fcntl(fd, F_GETFL) & O_DSYNC ? DURABLE_WRITE : WRITE;
    head(kind, path, offset, length, length);
    for (int i = 0; i < count && length > 0; i++) {
        size_t part = parts[i].iov_len < (size_t)length ? parts[i].iov_len : (size_t)length;
        put(parts[i].iov_base, part);
        length -= part;
    }
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define LOCKED(result, call, after)     \
    pthread_mutex_lock(&lock);          \
    result = call;                      \
    after;                              \
    pthread_mutex_unlock(&lock);        \
    return result

#define ALONE (struct iovec[]){{(void *)bytes, length}}, 1

ssize_t pwrite(int fd, const void *bytes, size_t length, off_t offset) {
    ssize_t done;
    LOCKED(done, REAL(pwrite)(fd, bytes, length, offset), written(fd, ALONE, offset, done));
}

ssize_t pwrite64(int fd, const void *bytes, size_t length, off64_t offset) {
    ssize_t done;
    LOCKED(done, REAL(pwrite64)(fd, bytes, length, offset), written(fd, ALONE, offset, done));
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
    ssize_t done;
    LOCKED(done, REAL(pwritev)(fd, parts, count, offset), written(fd, parts, count, offset, done));
}

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset) {
    ssize_t done;
    LOCKED(done, REAL(pwritev64)(fd, parts, count, offset), written(fd, parts, count, offset, done));
}

ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    ssize_t done;
    LOCKED(done, REAL(pwritev2)(fd, parts, count, offset, flags), written(fd, parts, count, offset, done));
}

ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags) {
    ssize_t done;
    LOCKED(done, REAL(pwritev64v2)(fd, parts, count, offset, flags), written(fd, parts, count, offset, done));
}

ssize_t write(int fd, const void *bytes, size_t length) {
    ssize_t done;
    LOCKED(done, REAL(write)(fd, bytes, length), written(fd, ALONE, lseek(fd, 0, SEEK_CUR) - done, done));
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    ssize_t done;
    LOCKED(done, REAL(writev)(fd, parts, count), written(fd, parts, count, lseek(fd, 0, SEEK_CUR) - done, done));
}

static void synced(int fd) {
    struct stat now;
    if (!fstat(fd, &now)) noted(S_ISDIR(now.st_mode) ? NAMES : SYNC, fd, 0, 0);
}

int fdatasync(int fd) {
    int code;
    LOCKED(code, REAL(fdatasync)(fd), if (!code) synced(fd));
}

int fsync(int fd) {
    int code;
    LOCKED(code, REAL(fsync)(fd), if (!code) synced(fd));
}

/* A file that was there before is noted too: it is no news to whoever reads the notes. */
#define OPENED(real)                                               \
    int fd;                                                        \
    va_list more;                                                  \
    va_start(more, flags);                                         \
    mode_t mode = flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(more, mode_t) : 0; \
    va_end(more);                                                  \
    LOCKED(fd, real, if (flags & O_CREAT) noted(MADE, fd, 0, 0))

int open(const char *path, int flags, ...) { OPENED(REAL(open)(path, flags, mode)); }

int open64(const char *path, int flags, ...) { OPENED(REAL(open64)(path, flags, mode)); }

int openat(int at, const char *path, int flags, ...) { OPENED(REAL(openat)(at, path, flags, mode)); }

int openat64(int at, const char *path, int flags, ...) { OPENED(REAL(openat64)(at, path, flags, mode)); }

int ftruncate(int fd, off_t length) {
    int code;
    LOCKED(code, REAL(ftruncate)(fd, length), if (!code) noted(CUT, fd, 0, length));
}

int ftruncate64(int fd, off64_t length) {
    int code;
    LOCKED(code, REAL(ftruncate64)(fd, length), if (!code) noted(CUT, fd, 0, length));
}

static void claimed(int fd, int mode, uint64_t offset, uint64_t length) {
    if (mode & FALLOC_FL_PUNCH_HOLE) noted(PUNCH, fd, offset, length);
    else if (!(mode & FALLOC_FL_KEEP_SIZE)) noted(CLAIM, fd, offset, length);
}

int fallocate(int fd, int mode, off_t offset, off_t length) {
    int code;
    LOCKED(code, REAL(fallocate)(fd, mode, offset, length), if (!code) claimed(fd, mode, offset, length));
}

int fallocate64(int fd, int mode, off64_t offset, off64_t length) {
    int code;
    LOCKED(code, REAL(fallocate64)(fd, mode, offset, length), if (!code) claimed(fd, mode, offset, length));
}
