// Who is ordered after whom, by vector clocks: every race is found, whatever the threads happen to do.
//
// Each stream counts its operations. What is known to be over is a vector: one count per stream. Streams learn from
// events that they wait for, events from the stream that records them, and the host from what it synchronises with or
// finds done. Two touches of one byte, one of them a write, must be ordered; so must an unmap, a release or an access by
// the host after all touches. All host threads count as one.
//
// A touch that the host knows to be over is before all that the host enqueues from then on: only the others are kept.
#include "fake.h"

enum { REPORT_BYTES = 512 };
typedef struct Record {
  uint64_t memory; // 0: the host's, whose offsets are addresses
  size_t offset, length;
  Pointer start;
  int actor, writes;
  uint32_t epoch;
  long operation;
  const char *what;
  struct Record *next;
} Record;

static Clock host;
static uint32_t last[ACTORS];
static char taken[ACTORS];
static Record *records;
static long operations;
static char report[REPORT_BYTES];

int actor_take(void) {
  for (int i = 0; i < ACTORS; i++)
    if (!taken[i] && last[i] <= host.at[i]) {
      taken[i] = 1;
      return i;
    }
  fprintf(stderr, "fakecuda: too many streams\n");
  abort();
}

void actor_leave(int actor) { taken[actor] = 0; }

void clock_join(Clock *known, const Clock *more) {
  for (int i = 0; i < ACTORS; i++)
    if (more->at[i] > known->at[i]) known->at[i] = more->at[i];
}

void host_learns(const Clock *known) { clock_join(&host, known); }

void clock_enqueue(Clock *stream_clock, int actor) { stream_clock->at[actor] = ++last[actor]; }

static void say(const char *problem, const char *what, const Record *former) {
  if (!report[0])
    snprintf(report, sizeof report, "%s: %s meets %s by stream %d of %zu bytes at %#lx", problem, what, former->what,
             former->actor, former->length, (unsigned long)former->start);
}

static void forget_known(void) {
  for (Record **at = &records; *at;) {
    Record *record = *at;
    if (record->epoch > host.at[record->actor]) { at = &record->next; continue; }
    *at = record->next;
    free(record);
  }
}

static const Record *unordered_with(const Record *fresh, const Clock *known, int unordered) {
  for (const Record *former = records; former; former = former->next) {
    if (former->memory != fresh->memory || !(former->writes || fresh->writes)) continue;
    if (former->offset >= fresh->offset + fresh->length || fresh->offset >= former->offset + former->length) continue;
    if (former->operation == fresh->operation ? unordered : former->epoch > known->at[former->actor]) return former;
  }
  return NULL;
}

// `unordered`: the touches of this operation may come in any order, as those of a batch do.
Result clock_touch(const Clock *known, int actor, const char *what, const Touch *touches, size_t count, int unordered) {
  Result result = OK;
  forget_known();
  operations++;
  for (size_t i = 0; i < count; i++)
    for (size_t done = 0; done < touches[i].length;) {
      Record *fresh = malloc(sizeof *fresh);
      *fresh = (Record){.start = touches[i].start + done, .length = touches[i].length - done, .actor = actor,
                        .writes = touches[i].writes, .epoch = known->at[actor], .operation = operations, .what = what};
      fresh->memory = memory_of(fresh->start, &fresh->offset, &fresh->length);
      const Record *former = unordered_with(fresh, touches[i].early ? &host : known, unordered);
      if (former) {
        say("unordered overlap", what, former);
        stick(result = LAUNCH_FAILED);
      }
      done += fresh->length;
      fresh->next = records;
      records = fresh;
    }
  return result;
}

// By address: the same memory may be in use elsewhere, under another mapping. A lost device does no more work.
Result clock_expect_idle(Pointer start, size_t length, const char *what, int code) {
  if (atomic_load(&sticky)) return OK;
  forget_known();
  for (const Record *former = records; former; former = former->next)
    if (former->start < start + length && start < former->start + former->length) {
      say("pending work", what, former);
      stick(code);
      return code;
    }
  return OK;
}

void clock_forget(uint64_t memory) {
  for (Record *record = records; record; record = record->next)
    if (record->memory == memory) record->memory = UINT64_MAX; // may come again as another's
}

void clock_reset(void) {
  memcpy(host.at, last, sizeof last);
  forget_known();
  report[0] = 0;
}

// ---------------------------------------------------------------- for tests
// The first breach of order since the last reset, or "".
API const char *fakecu_report(void) { return report; }

// The CPU reads or writes memory that streams may be using.
API Result fakecu_host_access(Pointer start, size_t length, int writes) {
  pthread_mutex_lock(&books);
  forget_known();
  Record fresh = {.start = start, .length = length, .writes = writes, .operation = -1};
  fresh.memory = memory_of(start, &fresh.offset, &fresh.length);
  const Record *former = unordered_with(&fresh, &host, 0);
  if (former) {
    say("unordered overlap", writes ? "a write by the host" : "a read by the host", former);
    stick(LAUNCH_FAILED);
  }
  pthread_mutex_unlock(&books);
  return former ? LAUNCH_FAILED : OK;
}
