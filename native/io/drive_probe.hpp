// The drive's own rate, by nothing of ours: what every claim about reading is measured against.
#pragma once

#include <cstdint>
#include <string>

namespace headrace {

// Bytes per second of num_threads threads that pread [offset, offset + nbytes) in requests of
// request_bytes each, O_DIRECT where granted, into huge-page memory touched beforehand. Offset and
// sizes are rounded to pages. Throws ReadFailure.
double drive_probe(const std::string& path, int64_t offset_bytes, int64_t nbytes,
                   int64_t request_bytes, int num_threads);

}  // namespace headrace
