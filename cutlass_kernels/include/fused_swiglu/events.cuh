// What the time stamps of a debug build say, and where they lie.
#pragma once

#include <cstdint>

namespace fused_swiglu {

// Each names what ends at the stamp.
enum class Event : uint8_t { none, turn_taken, gate_issued, gate_done, swished, up_issued, up_done, stored, loading, loaded };

// Of each thread block: consumer 0, consumer 1, the producer. A stamp is cycles << 8 | event, by the SM's clock; the last
// entry of a role is none.
constexpr int ROLES = 3, PRODUCER = 2, STAMPS_OF_A_ROLE = 256;

}  // namespace fused_swiglu
