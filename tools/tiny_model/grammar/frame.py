"""How every story begins and ends; what happens in between is the plots' business."""

WHO = (
    "once upon a time, there was a~ {trait} {kind} [named|called] {h}.",
    "once upon a time, there was a~ {trait} {kind} [named|called] {h} who loved to {like}.",
    "once upon a time there lived a~ {trait} {kind} [named|called] {h}.",
    "once upon a time, there was a~ {trait} {kind}. {his} name was {h}.",
    "once upon a time, in a {home} near {near}, lived a~ {trait} {kind} [named|called] {h}.",
    "long ago, there was a~ {trait} {kind} [named|called] {h}.",
    "there was once a~ {trait} {kind} [named|called] {h} who lived in a {home}.",
    "{h} was a~ {trait} {kind} who lived in a {home} near {near}.",
    "{h} was a~ {trait} {kind} who loved to {like}.",
    "{hx} lived in a {home} near {near}.",
    "in a {home} near {near} lived a~ {trait} {kind} [named|called] {h}.",
)
MORE = (
    "{he} lived with {his} family.",
    "{he} had a good friend [named|called] {f}.",
    "{he} loved to {like}.",
    "everyone in the village knew {him}.",
    "{he} was always [busy|happy to help|full of ideas].",
)
CONNECT = (
    "one day, ",
    "one day, ",
    "one morning, ",
    "one afternoon, ",
    "one fine day, ",
    "then one day, ",
)
AT_NIGHT = ("one night, ", "one evening, ", "one cold night, ")
CLOSE = (
    "that night, {h} fell asleep with a smile.",
    "{h} [went home|went to bed] happy that night.",
    "and {h} never forgot that day.",
    "it was the best day of the [week|year].",
    "from that day on, {h} and {f} were the best of friends.",
    "{h} smiled all the way home.",
    "and they were all very happy.",
    "{h} told the story to everyone {he} met.",
)
REQUEST = (
    "tell me a story about a~ {kind}.\n",
    "tell me a story about a~ {kind} [named|called] {h}.\n",
    "write a story about a~ {trait} {kind}.\n",
    "can you tell me a story about {hx}?\n",
)
