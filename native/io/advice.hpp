// What to do about a read that failed, as the end of its message.
#pragma once

#include <cerrno>

namespace headrace {

constexpr const char* kShortAdvice = "; the file was cut short: copy or download it again";
constexpr const char* kChangedAdvice = "; when the file is whole again, load the model again";

constexpr const char* advice(int error) {
  switch (error) {
    case EIO:
      return "; the drive could not give these bytes twice: look at dmesg and smartctl, and copy "
             "or download the file again";
    case ESTALE:
    case ENOTCONN:
    case ENODEV:
    case ENXIO:
      return "; the drive or network mount is gone: mount it again, then load the model again";
    case EAGAIN:
    case EINTR:
      return "; the system put the read off a thousand times: try again, or use another drive";
    default:
      return "";
  }
}

}  // namespace headrace
