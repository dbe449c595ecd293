// Exponential races (core/race.h) of many rows at once.
#pragma once

#include "../core/race.h"
#include "law_pass.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {

struct RaceTask : LawRow {
  Race race{};
  bool active = false;  // only with a valid law that is no point mass
  int64_t winner = -1;  // the result: an entry of the row

  RaceTask() = default;
  RaceTask(const LawRow& law, const Race& race, bool active)
      : LawRow(law), race(race), active(active) {}
};

// Finds the winners of all active tasks.
void run_races(const ThreadPool& pool, RaceTask* tasks, int64_t n);

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
