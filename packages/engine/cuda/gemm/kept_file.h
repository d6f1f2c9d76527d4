// A small text file of what was measured on this machine, kept from start to start: a heading, lines, "end".
//
// Invariants: a file that is not whole is as if there were none; nothing here throws: what cannot be kept lasts as long as the process.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace kvtier::cuda {

class KeptFile {
 public:
  // FOLDER/KIND-OF.txt, `of` with what no file name has replaced. The folder is made where it is missing; empty: nothing is kept.
  KeptFile(const std::string& folder, const std::string& kind, const std::string& of, std::string heading);

  // The lines between heading and end; null: there is no such file, or it is not whole.
  std::optional<std::vector<std::string>> Read() const;
  // One process at a time: `lines` are to be read and changed in there. A file that cannot be written is given up.
  void Change(const std::function<std::vector<std::string>()>& lines);
  // Empty: nothing is kept.
  const std::string& path() const { return path_; }

 private:
  bool Write(const std::vector<std::string>& lines) const;

  std::string path_;
  const std::string heading_;
};

}  // namespace kvtier::cuda
