// Scores of a query with many sequences: a loop over parasail's functions, passed in as pointers, without the GIL.

#include <cstdint>

struct Result { int score; }; // first field of parasail_result

extern "C" void esmeray_alignment_scores(
    Result* (*align)(const void*, const char*, int, int, int), void (*release)(Result*), const void* profile,
    const char* letters, const int64_t* ends, int64_t records, int open, int extend, int32_t* scores) {
  for (int64_t record = 0, start = 0; record < records; start = ends[record++]) {
    Result* result = align(profile, letters + start, int(ends[record] - start), open, extend);
    scores[record] = result->score;
    release(result);
  }
}
