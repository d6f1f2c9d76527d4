// Which congestion control our connections have.
//
// BBR, the default of some systems, paces: what goes out waits for timers. That is right across the world and wrong across a rack,
// where the timers cost more than the bytes: between two namespaces of one machine 3.4 GB/s with BBR and 8.5 with CUBIC, at half the
// CPU for a byte. So connections begin without, and those whose round trip is long get back what the system wanted. The other way
// round would be simpler, but once paced a socket remains so, whatever it is set to (sk_pacing_status). Systems that do not pace
// keep what they have.
#pragma once

namespace kvtier {

// Of a socket before it connects, or listens: what it accepts has the same.
void BeginUnpaced(int fd);

// One connection's choice.
class Congestion {
 public:
  // For whenever there is something to read or write, until it has chosen: the first round trip may have met a busy machine, so
  // only several long ones say that the other end is far.
  void Look(int fd);

 private:
  int looks_ = 0;
};

}  // namespace kvtier
