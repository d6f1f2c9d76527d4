// Text inside JSON: in checks' lines and in what the backend says of itself.
#pragma once
#include <string>

namespace kvtier::cuda {

// With its quotation marks; control characters become spaces.
inline std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
  }
  return quoted + '"';
}

}  // namespace kvtier::cuda
