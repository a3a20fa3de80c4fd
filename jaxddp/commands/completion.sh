# Print the words that may follow some words, one a line. $1 is the beginning of the completed word, and the others are
# the words before it.
_jaxddp_candidates() {
  local begin="$1" command="" first="" last="" word="" count=0
  shift
  for word in "$@"; do
    if [ "$word" = "=" ]; then
      continue
    elif [ "$word" = "--" ]; then
      # `jaxddp launch ... -- train CONFIG` contains another command.
      command="" first="" last="" count=0
      continue
    elif [ -z "$command" ]; then
      command="$word"
    else
      case "$word" in
        -*) ;;
        *)
          case "$last" in
            <FLAGS>|"" | [!-]*)
              count=$((count + 1))
              [ "$count" = 1 ] && first="$word" ;;
          esac ;;
      esac
    fi
    last="$word"
  done
  if [ -z "$command" ]; then
    <COMMANDS>
    return
  fi
  case "$begin" in
    -*) _jaxddp_options "$command"; return ;;
  esac
  case "$last" in
    <FLAGS>) ;;
    --*) _jaxddp_values "$command $last"; return ;;
  esac
  case "$count" in
    0) _jaxddp_places "$command" ;;
    1) _jaxddp_places "$command $first" ;;
    *) printf '@files\n' ;;
  esac
}

_jaxddp_options() {
  case "$1" in
<OPTIONS>
  esac
}

_jaxddp_values() {
  case "$1" in
<VALUES>
    *) printf '@files\n' ;;
  esac
}

_jaxddp_places() {
  case "$1" in
<PLACES>
    *) printf '@files\n' ;;
  esac
}
