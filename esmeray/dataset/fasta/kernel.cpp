// Parser of plain FASTA into columns of records, in one pass over the text. esmeray/dataset/fasta/records.py defines
// plain FASTA and loads this file. It allocates nothing and touches no Python object, so the caller releases the GIL.

#include <cstdint>
#include <cstring>

using Hash = uint64_t (*)(const void*, size_t);

// True if every byte, as a signed number, is above a limit. Bytes outside ASCII are negative.
static bool all_above(const uint8_t* bytes, int64_t size, int8_t limit) {
    int8_t least = 127;
    for (int64_t i = 0; i < size; ++i) {
        const int8_t byte = static_cast<int8_t>(bytes[i]);
        least = byte < least ? byte : least;
    }
    return least > limit;
}

// True if every byte is a letter of the store's alphabet: FIRST to LAST without LEFT_OUT.
static bool all_stored(const uint8_t* bytes, int64_t size) {
    uint8_t other = 0;
    for (int64_t i = 0; i < size; ++i) {
        other |= static_cast<uint8_t>(bytes[i] - FIRST) > LAST - FIRST;
        other |= bytes[i] == LEFT_OUT;
    }
    return !other;
}

// The end of a line's text. Windows files have a carriage return before the line feed.
static const uint8_t* without_return(const uint8_t* start, const uint8_t* line_end) {
    return line_end > start && line_end[-1] == '\r' ? line_end - 1 : line_end;
}

static uint8_t* append(uint8_t* to, const uint8_t* from, int64_t size) {
    std::memcpy(to, from, size);
    return to + size;
}

// text: whole records, from a '>' to a line feed. Each output is large enough for any text of this size.
// headers, ids: each is followed by a line feed.
// totals: bytes of headers, ids and residues, and whether all residues are letters of the alphabet.
// Returns the number of records, or -1 if the text is not plain.
extern "C" int64_t parse_plain_fasta(const uint8_t* text, int64_t size, Hash hash, uint8_t* headers, uint8_t* ids,
                                     uint8_t* residues, uint32_t* header_lengths, uint32_t* id_lengths,
                                     uint32_t* lengths, uint64_t* id_hashes, uint64_t* hashes, int64_t* totals) {
    const uint8_t *at = text, *const end = text + size;
    int64_t n = 0;
    bool stored = true;
    const uint8_t *const first_header = headers, *const first_id = ids, *const first = residues;
    for (; at < end; ++n) {
        const uint8_t* start = at + 1;  // behind the '>'
        const uint8_t* line_end = static_cast<const uint8_t*>(std::memchr(start, '\n', end - start));
        if (!line_end) return -1;
        const uint8_t* stop = without_return(start, line_end);
        if (!all_above(start, stop - start, ' ' - 1)) return -1;
        while (stop > start && stop[-1] == ' ') --stop;
        headers = append(headers, start, stop - start);
        *headers++ = '\n';
        header_lengths[n] = stop - start;
        while (start < stop && *start == ' ') ++start;
        const void* blank = std::memchr(start, ' ', stop - start);
        const int64_t id_length = (blank ? static_cast<const uint8_t*>(blank) : stop) - start;
        ids = append(ids, start, id_length);
        *ids++ = '\n';
        id_lengths[n] = id_length;
        id_hashes[n] = hash(start, id_length);
        const uint8_t* const first_residue = residues;
        for (at = line_end + 1; at < end && *at != '>'; at = line_end + 1) {
            line_end = static_cast<const uint8_t*>(std::memchr(at, '\n', end - at));
            const uint8_t* const line_stop = line_end ? without_return(at, line_end) : at;
            if (line_stop == at || *at == '#' || *at == ';') return -1;
            residues = append(residues, at, line_stop - at);
        }
        if (!all_stored(first_residue, residues - first_residue)) {
            if (!all_above(first_residue, residues - first_residue, ' ')) return -1;
            stored = false;
        }
        lengths[n] = residues - first_residue;
        hashes[n] = hash(first_residue, lengths[n]);
    }
    totals[0] = headers - first_header;
    totals[1] = ids - first_id;
    totals[2] = residues - first;
    totals[3] = stored;
    return n;
}
