// Preloaded: once the file $STALL_WHEN exists, what $STALL_WHAT names never returns: `fsync`, or
// opening or reading a file whose path contains it. Signals do not end it, as on a stuck mount. The
// file $STALL_WHEN.reached then exists.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int matches(const char *name) {
    const char *when = getenv("STALL_WHEN"), *what = getenv("STALL_WHAT");
    return name && when && what && strstr(name, what) && access(when, F_OK) == 0;
}

static void stall(const char *name) {
    if (!matches(name)) return;
    char reached[4096];
    int (*make)(const char *, mode_t) = dlsym(RTLD_NEXT, "creat");
    snprintf(reached, sizeof reached, "%s.reached", getenv("STALL_WHEN"));
    close(make(reached, 0600));
    for (;;) pause();
}

static void stall_file(int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length > 0) {
        path[length] = 0;
        stall(path);
    }
}

#define OPEN(name)                                                                                 \
    int name(const char *path, int flags, ...) {                                                   \
        va_list arguments;                                                                         \
        va_start(arguments, flags);                                                                \
        int mode = va_arg(arguments, int);                                                         \
        va_end(arguments);                                                                         \
        stall(path);                                                                               \
        int (*next)(const char *, int, ...) = dlsym(RTLD_NEXT, #name);                             \
        return next(path, flags, mode);                                                            \
    }
OPEN(open)
OPEN(open64)

ssize_t read(int file, void *buffer, size_t count) {
    if (getenv("STALL_WHEN")) stall_file(file);
    ssize_t (*next)(int, void *, size_t) = dlsym(RTLD_NEXT, "read");
    return next(file, buffer, count);
}

int fsync(int file) {
    stall("fsync");
    int (*next)(int) = dlsym(RTLD_NEXT, "fsync");
    return next(file);
}
